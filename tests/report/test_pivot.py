"""Tables of one's own runs: what is in a cell, what is bold, what is marked, and what is refused."""

import json
from statistics import fmean, stdev

import pytest

import fedflat
from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Measurement, paired_differences
from fedflat.report.pivot import table
from fedflat.runs.sweep.results import write_results

METHODS, ALPHAS, SEEDS = ("fedavg", "fedsam({rho})"), (0.1, 1.0), (0, 1, 2)
# Accuracies by method, α and seed: at α = 0.1 the seeds move both methods together, at α = 1.0 they do not.
ACCURACY = {
    ("fedavg", 0.1): (0.50, 0.60, 0.70),
    ("fedsam({rho})", 0.1): (0.52, 0.621, 0.719),
    ("fedavg", 1.0): (0.80, 0.85, 0.82),
    ("fedsam({rho})", 1.0): (0.83, 0.79, 0.80),
}


def results(**more):
    asked = {"server": {"rounds": 40}}
    return [
        {
            "method": method, "rho": 0.05 if "rho" in method else None, "split.alpha": alpha, "seed": seed,
            "scale": "full", "accuracy_last": ACCURACY[method, alpha][seed], "rounds_to_target": None,
            "lambda1": 10.0 + seed + 5 * alpha, **more, "asked": asked,
        }
        for method in METHODS for alpha in ALPHAS for seed in SEEDS
    ]  # fmt: skip


@pytest.fixture
def sweep(tmp_path):
    write_results(tmp_path / "mine", results())
    return tmp_path / "mine"


def cells(sheet):
    """The cells by row and column, with the names of both."""
    heads = sheet.joined()
    lines = ((", ".join(filter(None, line[:2])), line[2]) for block in sheet.blocks for line in block)
    return {(name, head): cell for name, row in lines for head, cell in zip(heads, row, strict=True)}


def test_a_cell_is_mean_and_deviation_over_the_seeds_in_per_cent(sweep):
    found = cells(table(sweep))
    assert [*found] == [(m, f"alpha = {a}") for m in ("fedavg", "fedsam(0.05)") for a in ALPHAS]
    for (method, alpha), values in ACCURACY.items():
        text = f"{100 * fmean(values):.2f} ± {100 * stdev(values):.2f}"
        assert found[method.replace("{rho}", "0.05"), f"alpha = {alpha}"].text == text


def test_the_best_of_each_column_is_bold(sweep):
    assert {place for place, cell in cells(table(sweep)).items() if cell.bold} == {
        ("fedsam(0.05)", "alpha = 0.1"),
        ("fedavg", "alpha = 1.0"),
    }
    lowest = cells(table(sweep, best="lowest"))
    assert lowest["fedavg", "alpha = 0.1"].bold and not lowest["fedsam(0.05)", "alpha = 0.1"].bold


def test_a_star_is_a_paired_difference_whose_interval_excludes_zero(sweep):
    marked = {place for place, cell in cells(table(sweep)).items() if cell.mark}
    assert marked == {("fedsam(0.05)", "alpha = 0.1")}
    for alpha in ALPHAS:
        known = [Measurement(m, s, {"a": ACCURACY[m, alpha][s]}) for m in METHODS for s in SEEDS]
        (difference,) = paired_differences(known)
        assert difference.decided == (alpha == 0.1)
    # Without pairing, the deviation over seeds (10 %) would hide a difference of 2 %.
    assert stdev(ACCURACY["fedavg", 0.1]) > 4 * (fmean(ACCURACY[METHODS[1], 0.1]) - fmean(ACCURACY["fedavg", 0.1]))
    other = cells(table(sweep, reference="fedsam(0.05)"))
    assert other["fedavg", "alpha = 0.1"].mark and not other["fedsam(0.05)", "alpha = 0.1"].mark


def test_two_seeds_have_no_marks(tmp_path):
    write_results(tmp_path, [row for row in results() if row["seed"] < 2])
    sheet = table(tmp_path)
    assert not any(cell.mark for cell in cells(sheet).values())
    assert "no marks: paired differences need 3 seeds" in sheet.notes


def test_several_metrics_are_columns_below_each_setting(sweep):
    sheet = table(sweep, value=["accuracy", "lambda1", "rounds_to_target"], columns="split")
    assert sheet.heads[1] == ["accuracy_last", "lambda1", "rounds_to_target"] * 2
    found = cells(sheet)
    assert found["fedavg", "alpha = 1.0 lambda1"].text == "16 ± 1"
    heads = sheet.write("latex").splitlines()
    assert r" & \multicolumn{3}{c}{$\alpha$ = 0.1} & \multicolumn{3}{c}{$\alpha$ = 1.0} \\" in heads
    assert r"method & accuracy (\%) & $\lambda_1$ & rounds to target" in sheet.write("latex")
    assert found["fedavg", "alpha = 0.1 rounds_to_target"].text == "40+"


def test_rows_of_two_settings_form_blocks(sweep):
    sheet = table(sweep, rows="method,alpha", columns=[])
    assert [[line[:2] for line in block] for block in sheet.blocks] == [
        [("fedavg", "0.1"), ("fedavg", "1.0")],
        [("fedsam(0.05)", "0.1"), ("fedsam(0.05)", "1.0")],
    ]
    assert sheet.corner == ("method", "alpha")


@pytest.mark.parametrize(("options", "sentence"), [
    ({"rows": "methud"}, "the runs do not vary in 'methud'; did you mean method?"),
    ({"value": "acuracy"}, "the runs have no metric 'acuracy'; did you mean accuracy_last?"),
    ({"columns": []}, "a cell would mix runs with split.alpha = 0.1 and 1.0; add it to the rows or columns"),
    ({"reference": "fedsol"}, "there is no row 'fedsol' to compare with"),
    ({"only": ["split.alpha=0.2"]}, "--only split.alpha=0.2: no run has it"),
    ({"only": ["alpha"]}, "--only alpha: write it as setting=value, with one of method, rho, split.alpha, seed"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(sweep, options, sentence):
    with pytest.raises(RecipeError, match=r"^[^\n]*$") as caught:
        table(sweep, **options)
    assert sentence in str(caught.value)


def test_a_run_that_is_given_twice_is_refused(sweep):
    with pytest.raises(RecipeError, match=r"fedavg, alpha = 0\.1 has a seed twice; give each run once"):
        table(sweep, sweep)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"seed": [1]}, "the seed [1] of a result is not a whole number"),
    ({"accuracy_last": "high"}, "the runs have no metric after a last round"),
])  # fmt: skip
def test_damaged_results_are_one_sentence(tmp_path, change, sentence):
    lines = [json.dumps({**row, **change}) + "\n" for row in results()]
    (tmp_path / "results.jsonl").write_text("".join(lines))
    with pytest.raises((RecipeError, RunError)) as caught:
        table(tmp_path)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", [1.5, 7, None, ["mlp"]])
def test_a_name_of_another_kind_in_a_damaged_file_is_shown_as_text(tmp_path, name):
    write_results(tmp_path, [{**row, "method": {"name": name}} for row in results() if row["method"] == "fedavg"])
    assert {row for row, _ in cells(table(tmp_path, columns="split.alpha"))} == {str(name)}


def test_a_number_that_is_not_finite_is_missing(tmp_path):
    rows = [{**row, "accuracy_last": float("nan")} if row["method"] == "fedavg" else row for row in results()]
    write_results(tmp_path, rows)
    assert cells(table(tmp_path))["fedavg", "alpha = 0.1"].text == "–"


def test_every_form_has_the_numbers_and_its_own_marks(sweep):
    sheet = table(sweep)
    assert r"fedsam(0.05) & \textbf{62.00 $\pm$ 9.95}$^{*}$ & 80.67 $\pm$ 2.08 \\" in sheet.write("latex").splitlines()
    assert r"\begin{tabular}{lrr}" in sheet.write("latex")
    assert r"| fedsam(0.05) | **62.00 ± 9.95**\* | 80.67 ± 2.08 |" in sheet.write("markdown").splitlines()
    assert sheet.write("csv").splitlines()[0] == "method,alpha = 0.1,alpha = 1.0"
    assert "fedsam(0.05),62.00 ± 9.95*,80.67 ± 2.08" in sheet.write("csv").splitlines()
    assert "<td><strong>62.00 ± 9.95</strong><sup>*</sup></td>" in sheet.write("html")
    assert "62.00 ±9.95*" in repr(sheet)


def test_the_ending_of_a_file_tells_the_form(sweep, tmp_path):
    sheet = table(sweep)
    for ending, start in {"tex": "% acc", "md": "**acc", "csv": "method", "html": "<table>"}.items():
        sheet.save(tmp_path / f"t.{ending}")
        assert (tmp_path / f"t.{ending}").read_text("utf-8").startswith(start)
    with pytest.raises(RecipeError, match="a table is written as"):
        sheet.save(tmp_path / "t.pdf")
    with pytest.raises(RunError, match="cannot be written"):
        sheet.save(tmp_path / "no" / "t.md")


def test_results_of_train_and_their_directories_give_the_same_table(tmp_path):
    federation = fedflat.federate("digits", split="dirichlet", clients=4, alpha=0.5)
    small = {"model": "mlp", "model_hidden": [4], "rounds": 2, "engine": "inline"}
    made = [
        fedflat.train(federation, method=method, seed=seed, out=tmp_path / f"{method}-{seed}", **small)
        for method in ("fedavg", "feddyn") for seed in (0, 1)
    ]  # fmt: skip
    sheet = table(*made)
    found = cells(sheet)
    values = [result.accuracy for result in made[:2]]
    assert found["fedavg", "accuracy_last"].text == f"{100 * fmean(values):.2f} ± {100 * stdev(values):.2f}"
    assert cells(table(tmp_path)) == found
    measured = made[0].flatness(samples=20)
    for result in made:
        (result.directory / "flatness.json").write_text(json.dumps(measured.record(), default=float))
    text = cells(table(tmp_path, value="lambda1"))["feddyn", "lambda1"].text
    assert text == f"{measured.spectrum.eigenvalues[0]:.4g} ± 0"
