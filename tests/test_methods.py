"""Methods as people write them."""

import pytest

from fedflat.catalogue import CATALOGUE
from fedflat.errors import RecipeError
from fedflat.method import Method
from fedflat.methods import explain, parse, spell
from fedflat.parts import ActivationNorm, Ascent, DynamicDual


def test_a_sum_a_list_and_tables_mean_the_same():
    written = ["feddyn(0.2) + man(zeta=0.1)", ["feddyn(penalty=0.2)", {"name": "man", "zeta": 0.1}]]
    assert {repr(parse(w)) for w in written} == {repr(Method(DynamicDual(0.2)) + ActivationNorm(0.1))}
    assert {spell(w) for w in written} == {
        "feddyn(penalty=0.2, dual='all', balanced=False) + man(zeta=0.1, layers='all')"
    }


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
        ("fedsam(rho='x')", "Ascent.rho = 'x': must be a number ≥ 0"),
        ("fedsam(rho=print)", "method = 'fedsam(rho=print)': the options of fedsam must be plain values"),
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


def test_parts_add_up_in_python():
    method = Method(DynamicDual(0.1)) + Ascent(0.1) + ActivationNorm(0.15)
    assert [type(part).__name__ for part in method.parts] == ["DynamicDual", "Ascent", "ActivationNorm"]
