"""What one step and one upload on a small example tell: the names of notes, and the numbers that a server knows."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedflat import Part
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.chain import Method
from fedflat.methods.example import example_rule
from fedflat.methods.parser import parse


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("fedavg", set()), ("fedsol", {"cosine", "lambda/*"}), ("fedsol(radius='fixed')", {"cosine"}),
        ("feddyn + man", {"activation/*"}), ("man(layers='official_convnet')", {"activation/*"}),
        ("top_eigenvalue", {"top eigenvalue"}), ("perfedavg + man", {"activation/*"}),
    ],
)  # fmt: skip
def test_the_names_of_a_methods_notes_are_seen_in_one_step(method, names):
    assert parse(method).notes == names


@pytest.mark.parametrize("name", CATALOGUE)
def test_steps_and_learning_rate_of_every_method_follow_from_the_rule(name):
    rule = replace(example_rule(), lr=0.02, steps=12, epochs=3)
    claims = parse(name).claims(rule)
    assert claims.steps == (6 if name == "perfedavg" else 12)
    # FedSWA's rate falls to a tenth; Per-FedAvg has an outer rate of its own.
    mean = sum(0.02 * (1 - 0.9 * k / 12) for k in range(12)) / 12
    assert claims.lr == pytest.approx({"fedswa": mean, "fedmoswa": mean, "perfedavg": 0.01}.get(name, 0.02))


def test_so_does_fednovas_normaliser():
    beta, steps = 0.5, 12
    expected = (steps - beta * (1 - beta**steps) / (1 - beta)) / (1 - beta)
    claims = parse("fednova").claims(replace(example_rule(), steps=steps))
    assert claims.figures == {"normaliser": [pytest.approx(expected)] * 2}


@dataclass(frozen=True)
class Unknowable(Part):
    """Its steps follow from what the client keeps, its figure from the model's size."""

    def first_memory(self, initial):
        return {"kept": initial.clone()}

    def plan(self, rule, sent, memory):
        return replace(rule, steps=1 + int(1000 * memory["kept"].norm()))

    def report(self, upload, sent, memory, outcome):
        return upload.update(size=torch.tensor([float(len(outcome.delta))])), memory


def test_a_number_that_follows_from_anything_else_is_not_known():
    claims = Method(Unknowable()).claims(example_rule())
    assert (claims.steps, claims.figures) == (None, {})
    assert claims.lr == 0.1
