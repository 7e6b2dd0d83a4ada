"""A network as a list of layers: read back as it was, and nothing but layers is ever made."""

import pytest
import torch
from torch import nn

from fedflat.errors import RecipeError
from fedflat.models.sequential import LAYERS, sequential, written_layers

NETS = [
    nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.Tanh(), nn.Linear(8, 10)),
    nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.LeakyReLU(0.2), nn.MaxPool2d(2)),
        nn.BatchNorm2d(4, momentum=0.3), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 10),
    ),
]  # fmt: skip


@pytest.mark.parametrize("net", NETS)
def test_a_network_is_built_again_from_its_layers(net):
    again = sequential(written_layers(net))
    assert repr(again) == repr(net)
    again.load_state_dict(net.state_dict())
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(again.eval()(x), net.eval()(x))


def test_a_network_that_is_more_than_its_layers_has_no_list():
    frozen, hooked = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    frozen.requires_grad_(False)
    hooked.register_forward_hook(lambda *_: None)

    class Mine(nn.Sequential):
        pass

    for net in (frozen, hooked, Mine(nn.Linear(2, 2)), nn.Sequential(nn.LSTM(2, 2)), nn.Linear(2, 2)):
        assert written_layers(net) is None


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (["Linear(2, __import__('os').system('touch mark'))"], "not a layer with plain arguments"),
        (["__import__('os').system('touch mark')"], "not a layer with plain arguments"),
        (["nn.Linear(2, 2)"], "not a layer with plain arguments"),
        (["Module()"], "there is no layer 'Module'"),
        (["Linea(2, 2)"], "did you mean Linear"),
        (["Linear(2)"], "cannot be made"),
        (["Linear(" + "(" * 5000], "not a layer"),
        ("Linear(2, 2)", "give a list of layers"),
        ([], "give a list of layers"),
        ([3], "give a list of layers"),
    ],
)
def test_anything_else_is_refused_and_nothing_is_run(layers, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=sentence):
        sequential(layers)
    assert not [*tmp_path.iterdir()]


def test_all_layers_are_torchs_own():
    assert all(issubclass(getattr(nn, name), nn.Module) for name in LAYERS)
