"""No vector is made on the processor where the clients train elsewhere: turns on torch's meta device.

Its tensors have shapes but no numbers, and an operation on tensors of two devices raises, as it would on a real one.
"""

import pytest
import torch
from torch import nn

from fedflat import Augment, Dataset, Federation, Samples, train
from fedflat.errors import RecipeError
from fedflat.local.kernels import sgd
from fedflat.local.slope import Notes
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.client import Worker
from fedflat.rounds.server import first_state, view
from fedflat.rounds.setup import Broadcast, Problem


@torch.no_grad()
def descend(ws, gs, vs, lr, rule, decay):
    """What the fused kernel touches."""
    for w, g, v in zip(ws, gs, vs or gs, strict=True):
        w.add_(g + v)


@pytest.fixture
def imagined(monkeypatch):
    """A federation on the meta device; what would read a number or has no kernel there is left out."""
    monkeypatch.setattr(Notes, "means", lambda self: {"loss": 0.0})
    monkeypatch.setattr(sgd, "descend", descend)
    monkeypatch.setattr(sgd, "DEVICES", ("meta",))
    samples, dataset = Samples.__new__(Samples), Dataset.__new__(Dataset)
    images, labels = torch.empty(24, 3, 8, 8, dtype=torch.uint8, device="meta"), torch.empty(24, device="meta").long()
    vars(samples).update(inputs=images, labels=labels, groups=None)
    vars(dataset).update(name="imagined", train=samples, test=samples, classes=5, mean=(0.5,), std=(0.2,))
    return Federation(dataset, (torch.arange(12), torch.arange(12, 24)), Augment(crop=1, flip=0.5, cutout=2))


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 5))


READ_NUMBERS = {"fedntd", "fedgf", "fedwmsam", "top_eigenvalue"}  # they pick entries by value, which no shape can tell


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("method", sorted({*CATALOGUE, "fedsmoo + man(0.1)"} - READ_NUMBERS))
def test_a_turn_of_every_method_stays_on_its_device(imagined, method, clip):
    problem = Problem.of(
        imagined, Network(net(), device="meta"), parse(method), Local(batch=4, momentum=0.9, clip=clip)
    )
    state = first_state(problem)
    upload, kept = Worker(problem).local_round(
        Broadcast(0, 0.1, problem.method.broadcast(view(problem, state))), 1, None
    )
    vectors = [upload.delta, *upload.vectors.values(), *kept.values()]
    assert {vector.device.type for vector in vectors} == {"meta"}


def test_without_an_accelerator_one_sentence_says_so(digits):
    with pytest.raises(RecipeError, match=r'engine.device = "(cuda|mps)": this machine has none'):
        train(digits, rounds=1, device="mps" if torch.cuda.is_available() else "cuda")
