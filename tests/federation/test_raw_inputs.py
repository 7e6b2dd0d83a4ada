"""The model that is handed out takes inputs as people have them, and is the model that was measured."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from fedflat import Dataset, Samples, federate, train
from fedflat.federation.raw_inputs import take_normalised
from fedflat.flatness import look


@pytest.fixture(scope="module")
def made():
    federation = federate("digits", clients=5, alpha=0.5)
    options = dict(rounds=2, engine="inline", sharpness=2, sharpness_samples=0, model_hidden=[8])
    return federation, train(federation, **options)


def test_it_takes_bytes_and_numbers_up_to_one_and_scores_as_the_run_did(made):
    federation, result = made
    test = federation.dataset.test
    for inputs in (test.inputs, test.inputs / 255, test.inputs.double() / 255):
        right = result.model(inputs).argmax(dim=1) == test.labels
        assert float(right.double().mean()) == pytest.approx(result.accuracy, abs=1e-12)


def test_its_curvature_on_raw_inputs_is_that_of_the_run(made):
    federation, result = made
    train = federation.dataset.train
    measured = dict(samples=0, k=1, products=40)
    tops = [
        look(result.model, data, **measured).spectrum.eigenvalues[0]
        for data in (federation, (train.inputs, train.labels), (train.inputs / 255, train.labels))
    ]
    assert tops == pytest.approx([result.last("lambda1")] * 3, rel=1e-3)
    assert tops[1:] == pytest.approx([tops[0]] * 2, rel=1e-5)


def test_inputs_that_are_normalised_already_get_a_warning_and_raw_ones_none(made):
    federation, result = made
    with pytest.warns(UserWarning, match=r"from -0\.811 to 1\.85; this model takes images as bytes, or in \[0, 1\]"):
        result.model(federation.held_out("test", 0, 9)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.model(federation.dataset.test.inputs[:9])


def test_it_is_the_users_class_and_can_be_copied_saved_and_trained_again(made):
    federation, _ = made
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = train(federation, net, rounds=1, engine="inline")
    assert type(result.model) is nn.Sequential and [*result.model.state_dict()] == [*net.state_dict()]
    inputs = federation.dataset.test.inputs[:9]
    file = io.BytesIO()
    torch.save(result.model, file)
    file.seek(0)
    for again in (copy.deepcopy(result.model), torch.load(file, weights_only=False)):
        assert torch.equal(again(inputs), result.model(inputs))
    whole = train(federation, net, rounds=1, lr=1e-12, cohort=1.0, engine="inline")
    twice = train(federation, whole.model, rounds=1, lr=1e-12, cohort=1.0, engine="inline")  # not normalised twice
    assert twice.accuracy == whole.accuracy
    assert not torch.equal(take_normalised(copy.deepcopy(result.model))(inputs / 255), result.model(inputs))


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_it_becomes_onnx_with_its_normalisation(made):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    federation, result = made
    inputs = federation.dataset.test.inputs[:4] / 255
    program = torch.onnx.export(result.model.eval(), (inputs,), dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), result.model(inputs).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int64])
def test_it_takes_tokens_in_the_type_in_which_the_text_has_them(kind):
    tokens = (torch.arange(80).reshape(20, 4) % 7).to(kind)
    samples = Samples(tokens, torch.arange(20) % 2)
    federation = federate(Dataset("texts", samples, samples, 2, (), (), vocabulary=7), "iid", 2)
    model = train(federation, "gpt", rounds=1, engine="inline", model_options={"width": 8, "layers": 1}).model
    assert torch.equal(model(federation.dataset.test.inputs), model(tokens.long()))


def test_numbers_and_tokens_stay_as_they_are():
    floats = federate(torch.rand(20, 3), torch.arange(20) % 2, split="iid", clients=2)
    assert not train(floats, rounds=1, engine="inline").model._forward_pre_hooks
