"""docs/results.md is what the committed results say, to the byte, and so are its figures."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from fedflat.report.results_page import _searches, pages, states
from fedflat.report.svg_plots import curves, forest, ticks
from fedflat.report.verdicts import claim_list, effect_text, verdict_list
from fedflat.runs import Effect
from fedflat.runs.claims import judge

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = ("figures/claims", "figures/methods")


@pytest.fixture(scope="module")
def generated():
    return pages()


def test_the_page_and_its_figures_are_rebuilt_to_the_byte(generated):
    there = {f"{folder}/{path.name}" for folder in FIGURES for path in (DOCS / folder).glob("*.svg")}
    assert there == {name for name in generated if name.endswith(".svg")}, "run: make results"
    for name, text in generated.items():
        assert (DOCS / name).read_text("utf-8") == text, f"{name}: run: make results"


def test_every_claim_has_its_section_and_every_figure_is_shown(generated):
    page = generated["results.md"]
    for state in states():
        assert f"## {state.claim.title}\n" in page and f"](#{state.claim.name})" in page
        assert (f"figures/claims/{state.claim.name}.svg" in page) == bool(state.known)
    shown = set(re.findall(r"\]\((figures/[^)]+)\)", page))
    drawn = {name for name in generated if name.startswith("figures/claims/")}
    assert shown == drawn | {"figures/shakespeare.png"}  # which benchmarks/shakespeare_curves.py draws


def test_controls_are_shown_as_such_and_not_counted_among_the_parts(generated):
    page = generated["results.md"]
    for state in states():
        if state.claim.ranking:
            named, beside = state.claim.ranking.measures, state.claim.ranking.beside
            held = sum(effect.finding.word == "holds" for effect in state.effects[: len(named)])
            assert f"| **{state.verdict}** | {held} of {len(named)} |" in page
            assert beside and all(f"\n| {name} (control) |" in page for name in beside)
            assert not any(f"{name} (control)" in page for name in named)


def test_the_hours_of_a_search_stand_in_its_table_where_they_are_known(tmp_path, monkeypatch):
    (tmp_path / "tuning").mkdir()
    trials = [{"method": "fedavg", "settings": {"local.lr": rate}, "scores": {"1": 0.5}} for rate in (0.1, 0.2)]
    found = [{"method": "fedavg", "best": {"local.lr": 0.2}, "score": 0.5, "combinations": 2, "given": 2, "used": 2}]
    (tmp_path / "tuning" / "mine.json").write_text(json.dumps([{**found[0], "trials": trials}]))
    monkeypatch.setattr("fedflat.report.results_page.shipped_evidence", lambda: tmp_path)
    assert "The hours of this search were not kept." in _searches()
    (tmp_path / "tuning" / "mine.hours.json").write_text('{"fedavg": 1.234}')
    lines = _searches()
    assert "### mine" in lines and not any("mine.hours" in line or "not kept" in line for line in lines)
    (row,) = (line for line in lines if line.startswith("| fedavg |"))
    assert row.endswith("| local.lr: 0.1, 0.2 | local.lr = 0.2 (edge) | 0.5000 | 1.23 |")


def test_figures_are_well_formed_and_hold_no_names_as_markup(generated):
    for name, text in generated.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(text)
    hostile = Effect("<script>&", judge([1.0, 2.0], 0.0, "higher"), 0.0, "higher", "difference", (1.0, 2.0))
    root = ElementTree.fromstring(forest([hostile], "a & b"))
    assert any("<script>&" in (each.text or "") for each in root.iter())


def test_a_curve_goes_where_its_values_are():
    svg = curves({"one": [[(1, 0.0), (2, 1.0)]], "two": [[(1, 0.5), (2, 0.5)]]}, "t")
    first, second = re.findall(r'<polyline points="([^"]+)"', svg)
    heights = [[float(pair.split(",")[1]) for pair in line.split()] for line in (first, second)]
    assert heights[0][0] > heights[1][0] == heights[1][1] > heights[0][1], "up is more"
    assert ticks(0, 40) == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("width", [60, 100])
def test_the_terminal_shows_every_part_in_its_width(width):
    found = states()
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(verdict_list(found))
    console.print(claim_list(found))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for state in found:
        assert words.count(state.claim.name) >= 2
        for effect in state.effects:
            assert all(word in words for word in f"{effect.name} {effect_text(effect)}".split())


def test_a_ratio_is_marked():
    ratio = Effect("λ₁", judge([0.0], 0.0, "lower"), 1.0, "lower", "ratio", (0.0,))
    assert effect_text(ratio).startswith("× ")
