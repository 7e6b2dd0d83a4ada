"""Faults that were found once and shall not come back."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import fedflat
from fedflat import Dataset, Federation, FedflatError, Samples, train
from fedflat.engine.inline import Inline
from fedflat.engine.store import Scratch, _system
from fedflat.local.rule import LocalRule
from fedflat.methods.parser import parse
from fedflat.methods.parts import LookbackAscent
from fedflat.models.vector import Network
from fedflat.recipe import Local, Server
from fedflat.rounds.cohort import draw_cohort
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem
from fedflat.runs.personal import personalise
from forking import Command, until


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize(
    "method",
    ["fedlesam", "fedsol(source='fedprox')", "fedsol(source='scaffold', scope='head')", "fedsol_ablation('A5')"],
)
def test_every_step_updates_the_batch_statistics_once(digits, method):
    settings = dict(rounds=1, cohort=4, steps=1, batch=0, evaluation_every=0, engine="inline")
    means = [train(digits, normed(), m, **settings).model[2].running_mean for m in (method, "fedavg")]
    assert means[1].any()
    torch.testing.assert_close(*means)


def test_the_frozen_global_model_has_the_global_batch_statistics(digits):
    problem = Problem.of(digits, Network(normed()), parse("fedntd"), Local(batch=0))
    state, engine = first_state(problem), Inline(problem)
    seen, standing_at = [], problem.network.standing_at
    problem.network.standing_at = lambda weights, buffers: seen.append(buffers.clone()) or standing_at(weights, buffers)
    for _ in range(2):
        seen.clear()
        sent = state.buffers.clone()
        state, _ = conduct(problem, state, engine, [0, 1])
        assert len(seen) == 2 and all(torch.equal(buffers, sent) for buffers in seen)
    engine.close()


def test_swa_never_shows_a_model_of_zeros(digits):
    model = train(digits, "mlp", "swa(start=0, every=2)", rounds=1, evaluation_every=0, engine="inline").model
    assert all(p.any() for p in model.parameters())


def test_swa_shows_where_the_servers_learning_rate_leads(digits):
    settings = dict(rounds=1, server_lr=0.5, evaluation_every=0, engine="inline")
    swa, fedavg = (train(digits, "mlp", m, **settings).model for m in ("swa(start=5)", "fedavg"))
    assert all(torch.equal(a, b) for a, b in zip(swa.parameters(), fedavg.parameters(), strict=True))


def test_fedlesam_looks_back_to_zero_weights_too():
    part, zeros, now = LookbackAscent(0.5), torch.zeros(3), torch.tensor([0.0, 3.0, 4.0])
    _, memory = part.report(None, {"weights": zeros}, part.first_memory(zeros), None)
    lookback = part.plan(LocalRule(0.1, 1), {"weights": now}, memory).carry["lookback"]
    torch.testing.assert_close(lookback, torch.tensor([0.0, -0.3, -0.4]))


def test_cumulative_batch_norm_does_not_depend_on_who_shares_a_worker(digits):
    def net():
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8, momentum=None)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.ReLU(), nn.Linear(8, 10))

    settings = dict(rounds=3, cohort=5, batch=0, steps=3)
    means = [train(digits, net(), **settings, engine="inline").model[2].running_mean]
    means += [train(digits, net(), **settings, engine="pool", workers=n).model[2].running_mean for n in (2, 4)]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])


def test_training_leaves_the_callers_module_alone(digits):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    first, second = (train(digits, module, rounds=1, engine="inline") for _ in range(2))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert first.accuracy == second.accuracy


def test_a_models_options_and_buffers_go_with_its_name(digits):
    model = train(digits, "mlp", rounds=1, engine="inline", model_hidden=[7], model_buffers="local").model
    assert [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] == [7, 10]
    with pytest.raises(FedflatError, match="no setting 'data_crop'"):
        train(digits, rounds=1, data_crop=4)


def test_frozen_parameters_stay_where_they_are(digits):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    module[1].requires_grad_(False)
    before = module[1].weight.clone()
    for method in ("fedavg", "fedprox", "fedsam", "feddyn"):
        trained = train(digits, module, method, rounds=2, weight_decay=0.1, engine="inline").model
        assert torch.equal(trained[1].weight, before)
        assert not torch.equal(trained[3].weight, module[3].weight)


def test_frozen_parameters_stay_where_they_are_in_fine_tuning_too(digits):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    module[1].requires_grad_(False)
    problem = Problem.of(digits, Network(module), parse("fedavg"), Local(weight_decay=0.1))
    before = module[1].weight.clone()
    assert personalise(problem, problem.network.weights.clone(), epochs=(1,), size=40)
    assert torch.equal(module[1].weight, before)


def test_the_head_is_what_makes_the_output_and_not_what_is_defined_last():
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 10)
            self.body = nn.Linear(64, 8)

        def forward(self, x):
            return self.head(torch.relu(self.body(x.flatten(1))))

    network = Network(HeadFirst())
    network.choose_head(torch.zeros(1, 1, 8, 8))
    assert network.head_module is network.module.head
    assert network.head == slice(0, 90)


def test_bernoulli_sampling_has_the_ratios_odds():
    sizes = [len(draw_cohort(Server(cohort=0.15, sampling="bernoulli"), 10, 0, t)) for t in range(2000)]
    assert sum(sizes) / 2000 == pytest.approx(1.5 / (1 - 0.85**10), abs=0.1)


def test_buffers_that_clients_keep_are_not_sent(digits):
    history = train(digits, normed(), rounds=1, cohort=2, batch=0, model_buffers="local", engine="inline").history
    parameters = sum(p.numel() for p in normed().parameters())
    assert history[0]["bytes_down"] == history[0]["bytes_up"] == 2 * 4 * parameters


def test_the_servers_own_sums_do_not_depend_on_the_threads(digits):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = train(digits, rounds=2, engine="inline").history
        torch.set_num_threads(2)
        two = train(digits, rounds=2, engine="inline").history
    finally:
        torch.set_num_threads(threads)
    assert [r["consistency"] for r in one] == [r["consistency"] for r in two]


def test_shared_files_go_where_there_is_room_and_orphans_are_swept(tmp_path):
    (tmp_path / "fedflat-999999999-abc").mkdir()
    (tmp_path / "fedflat-999999999-abc" / f"owner-{_system()}").touch()
    scratch = Scratch(1000, memory=tmp_path)
    assert scratch.path.parent == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == [scratch.path.name]
    scratch.close()
    too_much = Scratch(2**60, memory=tmp_path)
    assert too_much.path.parent != tmp_path
    too_much.close()


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_a_terminated_run_leaves_nothing_behind(tmp_path, engine):
    run = Command(tmp_path, "run", "--set", "server.rounds=100000", "--set", f"engine={engine}")
    metrics = tmp_path / "runs/0001/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size)
    assert [*Path("/dev/shm").glob(f"fedflat-{run.pid}-*")]
    run.signal(signal.SIGTERM)
    code, said = run.ended()
    assert (code, "Traceback" in said) == (143, False), said
    assert not [*Path("/dev/shm").glob(f"fedflat-{run.pid}-*")]


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (lambda: Samples(torch.zeros(3, 2), torch.zeros(2, dtype=torch.long)), "3 inputs with 2 labels"),
        (lambda: Samples(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int32)), "make them int64"),
        (lambda: Samples(1, torch.zeros(2)), "samples: inputs is a int; give a tensor"),
        (lambda: Dataset("mine", None, None, 3, (), ()), "mine: its train is a NoneType; give fedflat.Samples"),
        (lambda: fedflat.trust(["mine"]), r"trust: \['mine'\] is not the name of a package"),
        (lambda: fedflat.models.merged(3), "merged: is a int; give a module"),
        (lambda: dataset([0, 5]), "classes from 0 to 2"),
        (lambda: dataset([]), "at least one training"),
        (
            lambda: train(Federation(dataset([0, 1]), (torch.arange(2), torch.arange(0))), rounds=1),
            "client 1 holds no sample",
        ),
    ],
)
def test_data_that_do_not_fit_together_are_named(samples, sentence):
    with pytest.raises(FedflatError, match=sentence):
        samples()


def dataset(labels):
    samples = Samples(torch.zeros(len(labels), 2), torch.tensor(labels, dtype=torch.long))
    return Dataset("mine", samples, samples, 3, (), ())
