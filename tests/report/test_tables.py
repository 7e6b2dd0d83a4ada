"""The papers' tables: golden files, and published numbers that fit the sweeps that come along.

`FEDFLAT_GOLDEN=write pytest tests/report/test_tables.py` writes the golden files anew.
"""

import csv
import math
import os
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedflat.cli import app
from fedflat.errors import RecipeError
from fedflat.report.sheets import FORMS, Cell, Sheet, latex, markdown, page, terminal
from fedflat.report.tables import compared, published, published_names, settings_notes
from fedflat.runs.sweep import load_sweep
from fedflat.runs.sweep.results import JUDGED, METRICS, write_results

GOLDEN = Path(__file__).parents[1] / "golden"
MEASURED = {
    *METRICS, *(f"accuracy_{which}" for which in JUDGED),
    "lambda1", "lambda1/lambda5", "trace", "personal_local", "local_accuracy_before", "local_accuracy",
    "local_accuracy_std", "class_accuracy_std", "forgetting", "divergence", "discord", "cosine", "proximal_loss",
}  # fmt: skip
NAMED = re.compile(
    r"personal_(finetune|perfedavg|knn)_[15]|duality_fc2_\w+|landscape_(eigen|random)_(rise|centre)|(activation|lambda)/[\w.]+"
)


def rows(name, scale="full", metric="accuracy_last", **wanted):
    """A result for every run of a sweep, whose numbers count up from 0.6; or of those with the wanted grid values."""
    points = [p for p in load_sweep(name, scale).points if wanted.items() <= p.values.items()]
    results = [{**p.values, "scale": scale, metric: 0.6 + n / 1000, "asked": p.asked()} for n, p in enumerate(points)]
    assert results
    return results


def cells(sheet):
    """The texts of a sheet by block and line: cells(sheet)["FedAvg"]["ours"]."""
    return {block[0][0]: {kind: [cell.text for cell in line] for _, kind, line in block} for block in sheet.blocks}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_is_as_in_its_golden_file(form):
    results = rows("fedsol-table7", "tiny", setting="CIFAR-10")
    results += [{**row, "seed": 1, "accuracy_last": row["accuracy_last"] + 0.004} for row in results]
    written = FORMS[form](compared(published("fedsol-table7"), results))
    golden = GOLDEN / f"fedsol-table7.{ {'terminal': 'txt', 'markdown': 'md', 'latex': 'tex'}.get(form, form) }"
    if os.environ.get("FEDFLAT_GOLDEN") == "write":
        golden.write_text(written, "utf-8")
    assert written == golden.read_text("utf-8")


@pytest.mark.parametrize("name", published_names())
def test_every_published_number_has_its_runs_in_the_sweep_of_that_name(name):
    table, points = published(name), load_sweep(name).points
    used = set()
    for (i, row), (j, column) in product(enumerate(table.rows), enumerate(table.columns)):
        wanted = {**row.match, **column.match}
        found = [p.slug for p in points if wanted.items() <= p.values.items()]
        assert found or table.values[i][j] is None, wanted
        used |= set(found)
        metric = row.metric or column.metric or table.metric
        assert metric in MEASURED or NAMED.fullmatch(metric), metric
    assert used == {p.slug for p in points}


@pytest.mark.parametrize("name", published_names())
def test_a_table_without_results_shows_what_was_published(name):
    table = published(name)
    sheet = compared(table, [])
    assert {kind for block in sheet.blocks for _, kind, _ in block} == {"paper"}
    assert all(len(line) == len(table.columns) for block in sheet.blocks for *_, line in block)


def test_ours_stands_below_the_papers_with_the_difference():
    results = rows("fedsmoo-table1", metric="accuracy_best", setting="CIFAR-10 u=0.6", participation="10%-100")
    fedavg = [{**row, "accuracy_best": value} for row, value in zip(results, (0.79, 0.81), strict=False)]
    block = cells(compared(published("fedsmoo-table1"), fedavg))["10 %–100 FedAvg"]
    assert block["paper"][0] == "79.52 ± 0.13"
    assert block["ours"][0] == f"80.00 ± {100 * math.sqrt(2 * 0.01**2):.2f}"
    assert block["Δ"][0] == "+0.48"
    assert all(len(line) == 1 for line in block.values()), "columns without results of ours are left out"


def test_a_method_without_results_has_the_papers_line_alone():
    settings = ("CIFAR-10 α=0.1", "CIFAR-10 α=0.5")
    results = [row for setting in settings for row in rows("fedsol-table1", setting=setting, method="fedavg")]
    sheet = compared(published("fedsol-table1"), results)
    assert {name: [*block] for name, block in cells(sheet).items() if name in ("FedAvg", "FedSoL")} == {
        "FedAvg": ["paper", "ours", "Δ"],
        "FedSoL": ["paper"],
    }
    assert sheet.heads[-1] == ["α = 0.1", "α = 0.5"]


def test_the_papers_best_numbers_are_the_bold_ones_of_the_slides():
    bold = {
        (block[0][0], j)
        for block in compared(published("fedsmoo-table1"), []).blocks
        for j, cell in enumerate(block[0][2])
        if cell.bold
    }
    parts = ("10 %–100", "5 %–200")
    assert bold == {(f"{p} {'MoFedSAM' if j == 4 else 'FedSMOO'}", j) for p in parts for j in range(8)}


def test_the_papers_arrows_that_contradict_its_numbers_are_those_of_the_note():
    table = published("fedsol-table1")
    wrong = set()
    for row, values in zip(table.rows[1:], table.values[1:], strict=True):
        for column, value, reference in zip(table.columns, values, table.values[0], strict=True):
            if ("↑" in value.text) != (value.mean > reference.mean):
                wrong.add((row.heads[0], " ".join(column.heads[1:])))
    assert wrong == {
        ("FedNTD", "CIFAR-10 s = 5"),
        ("FedASAM", "CIFAR-10 s = 5"),
        ("FedSoL", "CIFAR-10 s = 5"),
        ("FedASAM", "SVHN s = 2"),
        ("FedProx", "CIFAR-10 α = 0.5"),
        ("FedASAM", "TissueMNIST α = 0.1"),
    }


def test_our_arrows_compare_with_our_baseline():
    results = rows("fedsol-table1", setting="CIFAR-10 s=2", seed=0)
    values = {"fedavg": 0.5, "fedprox(1.0)": 0.6, "fednova": 0.4, "fedntd": 0.5}
    results = [{**row, "accuracy_last": values[row["method"]]} for row in results if row["method"] in values]
    block = cells(compared(published("fedsol-table1"), results))
    shown = {name: block[name]["ours"][0] for name in ("FedAvg", "FedProx", "FedNova", "FedNTD")}
    assert shown == {"FedAvg": "50.00", "FedProx": "60.00 ↑", "FedNova": "40.00 ↓", "FedNTD": "50.00"}


def test_a_target_that_is_never_reached_is_shown_as_more_than_all_rounds():
    results = rows("man-rounds", metric="rounds_to_target", setting="CIFAR-100 IID", method="feddc(0.01)")
    for reached, shown, difference in (
        ((None, None, None), "500+", "–"),
        ((None, 10, 20), "15 (2 of 3 seeds)", "–"),
        ((280, 290, 300), "290 ± 10", "+1"),
    ):
        some = [{**row, "rounds_to_target": value} for row, value in zip(results, reached, strict=True)]
        block = cells(compared(published("man-rounds"), some))["FedDC"]
        assert (block["ours"][0], block["Δ"][0]) == (shown, difference)


def test_a_metric_with_a_deviation_of_its_own_shows_that():
    (row,) = rows("fedsol-table5", metric="personal_knn_5", setting="SVHN", method="fedavg")
    block = cells(compared(published("fedsol-table5"), [{**row, "personal_knn_5": 0.9, "personal_knn_5_std": 0.07}]))
    assert block["kNN-Per, e = 5"]["ours"] == ["90.0 ± 7.0"]
    assert block["kNN-Per, e = 5"]["Δ"] == ["−2.8"]


def test_where_no_number_was_published_only_ours_is_shown():
    block = cells(
        compared(
            published("duality-federated"), rows("duality-federated", metric="duality_fc2_gap", method="fedavg", seed=0)
        )
    )
    assert block["FedAvg"].keys() == {"ours"}
    assert block.keys() == {"FedAvg"}


def test_runs_of_one_sweep_serve_another_table():
    results = rows("man-accuracy", metric="rounds_to_target", setting="CIFAR-100 IID")
    sheet = compared(published("man-rounds"), results)
    assert "The settings are those of the sweep at full scale." in sheet.notes
    assert cells(sheet)["FedDC + MAN"]["ours"] != ["–"]


def test_what_differs_in_the_settings_is_said():
    assert settings_notes("fedsol-table6", rows("fedsol-table6")) == [
        "The settings are those of the sweep at full scale."
    ]
    notes = settings_notes("fedsol-table6", rows("fedsol-table6", "laptop"))
    assert "server.rounds: 300 at full scale, 30 here" in notes
    assert "data.limit: 0 at full scale, 10000 here" in notes
    assert "seeds: 3 at full scale, 1 here" in notes
    assert not [note for note in notes if note.startswith(("data.mean", "local."))]
    changed = rows("fedsol-table6")
    changed[0]["asked"]["local"]["lr"] = 0.5
    assert settings_notes("fedsol-table6", changed) == ["local.lr: 0.01 at full scale, 0.5 here (1 of 21 runs)"]


def test_a_seed_with_a_setting_of_its_own_is_compared_with_that_seed():
    ours = rows("man-eigenvalues", metric="lambda1", method="fedavg")
    assert {row["asked"]["split"]["seed"] for row in ours} == {23217, 43217, 83217}
    assert settings_notes("man-eigenvalues", ours) == ["The settings are those of the sweep at full scale."]
    ours[-1]["asked"]["split"]["seed"] = 5
    assert settings_notes("man-eigenvalues", ours) == ["split.seed: 83217 at full scale, 5 here (1 of 6 runs)"]


def test_a_column_may_have_a_factor_and_digits_of_its_own():
    ours = [{**row, "lambda1": 12.345, "trace": 987.6} for row in rows("man-sensitivity", zeta=0.1, seed=0)]
    sheet = compared(published("man-sensitivity"), [{**row, "accuracy_last": 0.5} for row in ours])
    block = cells(sheet)["δ = 0.3 ζ = 0.1"]
    assert dict(zip(sheet.heads[0], block["ours"], strict=True)) == {"accuracy": "50.00", "λ₁": "12.35", "trace": "988"}


def test_results_of_two_scales_are_not_mixed():
    both = rows("fedsol-table6", "laptop") + rows("fedsol-table6", "tiny")
    with pytest.raises(RecipeError, match="the results mix the scales laptop and tiny"):
        compared(published("fedsol-table6"), both)


def test_a_table_that_there_is_not_is_named():
    with pytest.raises(RecipeError, match="there is no table 'fedsol-tabel1'; did you mean fedsol-table1"):
        published("fedsol-tabel1")


@given(st.text(min_size=1).filter(str.isprintable))
def test_no_text_can_break_out_of_a_cell(text):
    sheet = Sheet("title", [["head"]], [[("name", "ours", [Cell(text, bold=True)])]])
    assert page(sheet).count("<") == page(Sheet("title", [["head"]], [[("name", "ours", [Cell("x", True)])]])).count(
        "<"
    )
    (line,) = [line for line in markdown(sheet).splitlines() if line.startswith("| name")]
    assert len(re.findall(r"(?<!\\)\|", line)) == 4
    (line,) = [line for line in latex(sheet).splitlines() if line.startswith("name & ours")]
    assert len(re.findall(r"(?<!\\)&", line)) == 2 and not re.search(r"(?<!\\)[%#]", line)


def test_the_command_writes_a_table_to_a_file(tmp_path, capsys):
    app(["table"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == published_names()
    app(["table", "fedsmoo-table2", "--format", "latex", "-o", str(tmp_path / "t.tex")], standalone_mode=False)
    assert r"\multicolumn{2}{c}{FedSAM}" in (tmp_path / "t.tex").read_text()
    with pytest.raises(RecipeError, match="there is no directory"):
        app(["table", "fedsmoo-table2", "-o", str(tmp_path / "no" / "t.txt")], standalone_mode=False)


def test_results_of_another_sweep_are_not_passed_over_in_silence(tmp_path, capsys):
    others = rows("fedsol-table1", method="fedavg", setting="CIFAR-10 α=0.1")
    said = f"None of the {len(others)} runs given belongs to this table; a run of it has, for example,"
    assert compared(published("fedsmoo-table2"), others).notes[0].startswith(said)
    write_results(tmp_path, others)
    app(["table", "fedsmoo-table2", str(tmp_path)], standalone_mode=False)
    assert said in capsys.readouterr().err
    ours = rows("fedsmoo-table2")
    assert not any("belongs" in note for note in compared(published("fedsmoo-table2"), ours).notes)


def test_a_line_break_in_a_text_does_not_end_a_comment_or_a_row():
    odd = "name\n\\input{/etc/passwd}\x1b[2J<script>"
    sheet = Sheet(odd, [[odd]], [[(odd, odd, [Cell(odd)])]], [odd])
    lines = latex(sheet).splitlines()
    assert not any(line.startswith("\\input") for line in lines)
    assert len(markdown(sheet).splitlines()) == 7 and "<script" not in markdown(sheet)
    assert all("\x1b" not in form(sheet) for form in (latex, markdown, page, terminal))


def test_a_value_of_a_sweep_does_not_become_a_formula(tmp_path):
    row = {"method": "=HYPERLINK(1)", "label": "@x", "scale": "full", "accuracy_last": -0.5}
    write_results(tmp_path, [row])
    assert (tmp_path / "results.csv").read_text().splitlines()[1] == "'=HYPERLINK(1),'@x,full,-0.5"


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3+A1", "@SUM(A1)", "＝1+1"])
def test_nor_does_a_text_of_a_table(text):
    sheet = Sheet("t", [[text]], [[(text, text, [Cell(text)])]], corner=(text, text))
    rows = [*csv.reader(sheet.write("csv").splitlines())]
    assert rows == [[f"'{text}"] * 3] * 2


def test_numbers_of_a_table_stay_numbers():
    cells = [Cell(text) for text in ("-0.5", "+1.20 ± 0.30", "-1e-05", "–", "12.3", "+2*")]
    (_, row) = csv.reader(Sheet("t", [["x"] * 6], [[("a", "", cells)]]).write("csv").splitlines())
    assert row == ["a", *(cell.text for cell in cells)]
