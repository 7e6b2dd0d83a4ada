"""A function of an objective as a function of model, data and loss: its signature, its help and its mistakes."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.errors import RecipeError
from fedflat.flatness import Hessian, Objective, look, objective_of, of_model

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(24) % 3


def moment(objective, power: "float" = 1.0, count: int | None = None, seed: int = 0, unit: str = ""):
    """A power of the loss.

    Args:
        objective: the mean loss.
        power: the power.
    """
    value = objective.value() if isinstance(objective, Objective) else objective.size
    return value**power, count, seed


def network():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(5, 3).double()


def smooth(z, y):
    return F.cross_entropy(z, y, label_smoothing=0.3)


def test_the_signature_and_the_help_are_those_of_model_data_and_the_options():
    function = of_model(moment)
    shown = [(p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()]
    given = {"data": None, "loss": None}
    named = {"samples": 1000, "batch": 100, "collate": None, "power": 1.0, "count": None, "seed": 0, "unit": ""}
    assert shown == [
        ("model", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        *((name, "POSITIONAL_OR_KEYWORD", default) for name, default in given.items()),
        *((name, "KEYWORD_ONLY", default) for name, default in named.items()),
    ]
    assert function.__doc__.startswith("A power of the loss.\n")
    assert "objective: the mean loss" not in function.__doc__
    assert "        data: a pair of tensors" in function.__doc__ and "        power: the power.\n" in function.__doc__
    assert function.__name__ == function.__qualname__ == "moment"
    assert of_model(moment, "power_of").__name__ == "power_of"
    assert of_model(lambda objective: 0).__doc__ == ""


def test_model_data_and_loss_become_the_objective_and_the_rest_are_options():
    function, data = of_model(moment), (X, Y)
    given = dict(samples=10, batch=3, collate=lambda pair: pair)
    for seed in ({}, {"seed": 0}, {"seed": 3}):
        with objective_of(network(), data, smooth, **given, **seed) as objective:
            value, expected = objective.value(), seed.get("seed", 0)
        assert function(network(), data, smooth, **given, **seed) == (value, None, expected)
        assert function(network(), data=data, loss=smooth, **given, **seed) == (value, None, expected)
        assert function(network(), data, smooth, power=2.0, count=7, **given, **seed) == (value**2, 7, expected)
    whole = Objective(network(), F.cross_entropy, [(X, Y)])
    assert function(network(), data)[0] == pytest.approx(whole.value(), rel=1e-14)


def test_an_objective_or_an_operator_takes_the_place_of_model_and_data():
    function, objective = of_model(moment), Objective(network(), F.cross_entropy, [(X, Y)])
    assert function(objective, power=2.0, seed=5) == (objective.value() ** 2, None, 5)
    assert function(objective, power=2.0, count=None, unit="nat") == (objective.value() ** 2, None, 0)
    assert function(objective, 2.0, 7) == (objective.value() ** 2, 7, 0)
    assert function(Hessian(objective), power=2.0) == (18**2, None, 0)


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1])
def test_seeds_of_64_bits_and_other_numbers_of_any_size_are_taken(number):
    objective = Objective(network(), F.cross_entropy, [(X, Y)])
    assert of_model(moment)(objective, power=0.0, count=2**80, seed=number) == (1.0, 2**80, number)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seed": 2**63}, r"^moment: seed is 9223372036854775808; it must fit into 64 bits$"),
        ({"seed": -(2**63) - 1}, "^moment: seed is -9223372036854775809; it must fit into 64 bits$"),
        ({"seed": 1.5}, "^moment: seed is 1.5; it must be a whole number$"),
        ({"seed": None}, "^moment: seed is None; it must be a whole number$"),
        ({"count": "ten"}, "^moment: count is 'ten'; it must be a whole number$"),
        ({"power": "two"}, "^moment: power is 'two'; it must be a number$"),
        ({"power": float("nan")}, "^moment: power is nan; it must be a number$"),
        ({"pover": 2.0}, r"^moment: there is no option 'pover'; did you mean power\?$"),
        ({"objective": 2.0}, "^moment: there is no option 'objective'; known: count, power, seed, unit$"),
    ],
)
def test_a_mistake_in_an_option_is_one_sentence_for_a_model_and_for_an_objective(options, sentence):
    function = of_model(moment)
    with pytest.raises(RecipeError, match=sentence):
        function(network(), (X, Y), **options)
    with pytest.raises(RecipeError, match=sentence):
        function(Objective(network(), F.cross_entropy, [(X, Y)]), **options)


def test_options_after_the_loss_are_given_by_their_name():
    with pytest.raises(RecipeError, match=r"^moment: after model, data and loss, give options by their name$"):
        of_model(moment)(network(), (X, Y), smooth, 2.0)


@pytest.mark.parametrize("thing", [torch.eye(3), SimpleNamespace(products=0), {}, None], ids=lambda x: type(x).__name__)
def test_what_is_neither_a_model_nor_an_operator_is_refused(thing):
    """A tensor can be multiplied and a record may count products: an operator does both."""
    for function, name in ((of_model(moment), "moment"), (look, "look")):
        with pytest.raises(RecipeError, match=f"^{name}: the model is a {type(thing).__name__}; give an nn.Module"):
            function(thing)
