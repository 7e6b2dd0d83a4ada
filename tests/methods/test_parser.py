"""Methods as people write them."""

import math
from dataclasses import dataclass

import pytest

from fedflat.errors import RecipeError
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.chain import Method
from fedflat.methods.parser import explain, parse, spell
from fedflat.methods.part import Part
from fedflat.methods.parts import ActivationNorm, Ascent, DynamicDual, Proximal, ProximalAscent
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.loading import load_run
from fedflat.trusted import trust


def test_a_sum_a_list_and_tables_mean_the_same():
    written = ["feddyn(0.2) + man(zeta=0.1)", ["feddyn(penalty=0.2)", {"name": "man", "zeta": 0.1}]]
    assert {repr(parse(w)) for w in written} == {repr(Method(DynamicDual(0.2)) + ActivationNorm(0.1))}
    assert {spell(w) for w in written} == {
        "feddyn(penalty=0.2, dual='all', balanced=False) + man(zeta=0.1, layers='all', attention=False)"
    }


def test_true_and_false_are_written_as_in_a_recipe_or_as_in_python():
    assert repr(parse("man(0.1, attention=true)")) == repr(Method(ActivationNorm(0.1, attention=True)))
    assert parse("man(0.1, 'all', false)").parts == parse("man(0.1, attention=False)").parts


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_spells_itself_out_and_back(name):
    assert repr(parse(spell(name))) == repr(parse(name))
    assert {o["name"] for o in explain(name)["options"]} == set(CATALOGUE[name].options())


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("fedsoam", "method: there is no 'fedsoam'; did you mean fedsam?"),
        ("fedsam(rh=0.1)", "method: fedsam has no option 'rh'; did you mean rho?"),
        ("fedsam(1, 2, 3)", "method: fedsam takes at most 1 options, 3 given"),
        ("fedsam(rho=-1)", "Ascent.rho = -1: must be a number ≥ 0"),
        ("adamw(beta2=1.0)", "LocalAdamW.beta2 = 1.0: must be a number ≥ 0 and < 1"),
        ("fedadamw(beta1=1.0)", "CarriedAdamW.beta1 = 1.0: must be a number ≥ 0 and < 1"),
        ("fedsam(rho='x')", "Ascent.rho = 'x': must be a number ≥ 0"),
        ("fedsam(rho=print)", "method = 'fedsam(rho=print)': the options of fedsam must be plain values"),
        ("fedsam(**{})", "method = 'fedsam(**{})': write the options of fedsam one by one, without * or **"),
        ("fedsam(**{'rho': 1})", "method = \"fedsam(**{'rho': 1})\": write the options of fedsam one by one"),
        ("fedsam(*[1])", "method = 'fedsam(*[1])': write the options of fedsam one by one"),
        ("fedsam(rho=1, rho=2)", "method = 'fedsam(rho=1, rho=2)': fedsam is given rho twice"),
        ("fedsam(0.1, rho=0.2)", "method: fedsam is given rho twice, as 0.1 and 0.2"),
        ("fedsam * 2", "method = 'fedsam * 2': write it like"),
        ("fedsam +", "method = 'fedsam +': write it like"),
        ("", "method = '': write it like"),
        (3, "method = 3: write it like"),
        ({"rho": 1}, "method: a table needs a name"),
        ("fedsam + fedsam", "method: Ascent and Ascent both set the ascent; a method can have only one"),
    ],
)
def test_mistakes_are_named(written, sentence):
    with pytest.raises(RecipeError) as caught:
        parse(written)
    assert str(caught.value).startswith(sentence)


OWN = "fedflat.methods.parts:Ascent(rho=0.05) + feddyn(0.2) + fedflat.methods.parts.terms:ActivationNorm"


def test_a_part_of_ones_own_is_named_by_its_path():
    method = parse(OWN)
    assert set(method.parts) == {Ascent(0.05), DynamicDual(0.2), ActivationNorm()}
    assert set(parse(spell(OWN)).parts) == set(method.parts)


def test_a_method_made_in_python_spells_itself_so_that_it_can_be_read_back():
    method = Method(ProximalAscent(Proximal(0.5), 0.7), DynamicDual(0.2))
    assert repr(parse(spell(method))) == repr(method)
    assert spell(Method()) == "fedavg"


@dataclass(frozen=True)
class Limits(Part):
    """A part with options that only a name can write."""

    most: float = math.inf
    spans: tuple[tuple[float, float], ...] = ((-math.inf, 1.0),)


@pytest.mark.parametrize("part", [Limits(), Limits(0.5, ((0.0, math.inf), (-math.inf, -1.5)))])
def test_infinite_options_of_ones_own_part_are_read_back(part):
    trust(__name__)
    assert parse(spell(part)).parts == (part,)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("os:system", "method = 'os:system': is code from outside of fedflat; if you trust it add --trust"),
        ("os:system('true')", "method: name the options of os:system"),
        ("fedflat.at_all:Part", "method = 'fedflat.at_all:Part': fedflat.at_all cannot be imported"),
        ("fedflat.methods:option", "method = 'fedflat.methods:option': is not a class that inherits from Part"),
        (
            "fedflat.methods.parts:Ascent(**{})",
            "method = 'fedflat.methods.parts:Ascent(**{})': write the options of fedflat.methods.parts:Ascent one",
        ),
        (
            "fedflat.methods.parts:Ascent(rh=1)",
            "method: fedflat.methods.parts:Ascent has no option 'rh'; did you mean rho?",
        ),
        ("fedflat.methods.parts:Ascent(rho=-1)", "Ascent.rho = -1: must be a number ≥ 0"),
    ],
)
def test_mistakes_in_the_path_of_a_part_are_named(written, sentence):
    with pytest.raises(RecipeError) as caught:
        parse(written)
    assert str(caught.value).startswith(sentence)


def test_a_run_with_a_part_of_ones_own_is_resumed_and_opened(tmp_path):
    short = ["server.rounds=2", "engine=inline", "local.steps=1"]
    recipe = load(None, [f"method={OWN}", *short])
    problem = prepare(recipe)
    execute(problem, tmp_path / "run")
    again = load_run(tmp_path / "run")
    assert repr(again.method) == repr(parse(OWN)) and again.recipe.method == spell(OWN)
    longer = load(tmp_path / "run" / "recipe.toml", ["server.rounds=3"])
    problem = prepare(longer)
    assert len(execute(problem, tmp_path / "run", resume=True).history) == 3


def test_parts_add_up_in_python():
    method = Method(DynamicDual(0.1)) + Ascent(0.1) + ActivationNorm(0.15)
    assert [type(part).__name__ for part in method.parts] == ["DynamicDual", "Ascent", "ActivationNorm"]
