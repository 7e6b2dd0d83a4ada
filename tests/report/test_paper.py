"""Figures for a paper: what is drawn, how large, in which format, and what is refused."""

import json

import numpy as np
import pytest
from matplotlib import rcParams

import fedflat
from fedflat.drawing import COLOURS, COLUMN, MARKERS, PAGE
from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Landscape
from fedflat.recipe import load
from fedflat.report.lines import read_lines
from fedflat.report.paper import _marker, plot

KINDS = ("curves", "target", "flatness", "split", "landscape")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods by two seeds as directories, with recorded curves, flatness and landscapes; nothing is trained."""
    base = tmp_path_factory.mktemp("runs")
    for k, method in enumerate(("fedavg", "fedsam(rho=0.1)")):
        for seed in (0, 1):
            folder = base / f"{method[:6]}-{seed}"
            folder.mkdir()
            recipe = load(None, [f'method="{method}"', f"seed={seed}", "evaluation.target=0.5", "split.clients=8"])
            (folder / "recipe.toml").write_text(recipe.to_toml())
            values = [0.2 + 0.1 * k + 0.02 * seed + 0.1 * t for t in range(5)]
            traffic = {"bytes_up": 10, "bytes_down": 10, "seconds": 0.1, "loss": 1.0}
            lines = [{"round": t + 1, "accuracy": value, **traffic} for t, value in enumerate(values)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            trace = {"mean": 9.0, "error": 0.1, "low": 8.0, "high": 10.0}
            spectrum = {"eigenvalues": [4.0 + k + seed], "residuals": [0.0], "ratio": None, "trace": trace}
            measured = {"samples": 10, "loss": 1.0, "adaptive_sharpness": 0.3, "ascent_sharpness": 0.1,
                        "average_sharpness": 0.1, "average_sharpness_low": 0.0, "average_sharpness_high": 0.2,
                        "weight_norm": 1.0, "log10_capacity": 2.0}  # fmt: skip
            flat = {**measured, "spectrum": {**spectrum, "products": 3, "bytes": 0}}
            (folder / "flatness.json").write_text(json.dumps(flat))
            step = np.linspace(-1.0, 1.0, 5)
            bowl = Landscape(np.stack([step, step]), 1 + np.add.outer(step**2, step**2), 1.0)
            bowl.save(folder / "landscape-eigen.npz")
    return base


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "inches"), [("column", COLUMN), ("page", PAGE)])
def test_every_kind_fits_the_page_and_keeps_its_letters_readable(runs, kind, width, inches):
    before = dict(rcParams)
    figure = plot(runs, kind=kind, width=width)
    assert figure.get_figwidth() == inches
    figure.canvas.draw()
    texts = [text for text in figure.findobj(lambda each: hasattr(each, "get_fontsize")) if text.get_text()]
    assert texts and min(text.get_fontsize() for text in texts) >= 7
    assert dict(rcParams) == before


def test_a_curve_is_the_mean_over_the_seeds_with_their_range(runs):
    (axes,) = plot(runs).axes
    (avg, sam), bands = axes.get_lines()[:2], axes.collections
    assert (avg.get_label(), sam.get_label()) == ("fedavg", "fedsam")
    np.testing.assert_allclose(avg.get_ydata(), [0.21, 0.31, 0.41, 0.51, 0.61])
    np.testing.assert_allclose(bands[0].get_paths()[0].vertices[:, 1].min(), 0.2)
    np.testing.assert_allclose(bands[0].get_paths()[0].vertices[:, 1].max(), 0.62)
    assert avg.get_color() != sam.get_color() and avg.get_linestyle() != sam.get_linestyle()


def test_only_selects_runs_by_a_setting_of_their_recipe(runs):
    def labels(*only):
        lines = plot(runs, only=only).axes[0].get_lines()
        return [name for line in lines if not (name := line.get_label()).startswith("_")]

    assert labels("method=fedsam") == ["fedsam"]
    assert labels("method=fedsam", "method=fedavg", "split.clients=8") == ["fedavg", "fedsam"] == labels()


def test_lines_of_one_colour_have_different_markers():
    seen = [(COLOURS[place % len(COLOURS)], _marker(place)) for place in range(len(COLOURS) * len(MARKERS))]
    assert len({*seen}) == len(seen)


def test_rounds_to_the_target_are_bars_and_a_seed_that_never_gets_there_is_said(runs):
    (axes,) = plot(runs, kind="target", target=0.6).axes
    lengths = [bar.get_width() for bar in axes.patches]
    assert lengths == [5, 4]  # fedavg's first seed reaches 0.6 in round 5, its second at 0.62; fedsam both in round 4
    (axes,) = plot(runs, kind="target", target=0.61).axes
    assert "> 5 (1 of 2 seeds)" in axes.texts[0].get_text()


def test_a_target_that_no_run_reaches_is_said_instead_of_drawn(runs):
    with pytest.raises(RecipeError, match=r"no run reaches accuracy 2; their last values are 0\.6 to 0\.72"):
        plot(runs, kind="target", target=2)


def test_flatness_is_drawn_against_the_last_value_of_the_metric(runs):
    (axes,) = plot(runs, kind="flatness").axes
    seeds, mean = axes.get_lines()[:2]
    assert (list(seeds.get_xdata()), [round(y, 6) for y in seeds.get_ydata()]) == ([4.0, 5.0], [0.6, 0.62])
    assert (float(mean.get_xdata()[0]), round(float(mean.get_ydata()[0]), 6)) == (4.5, 0.61)


@pytest.mark.parametrize(("ending", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_ending_tells_the_format(runs, tmp_path, ending, start):
    plot(runs, out=tmp_path / f"curves.{ending}")
    content = (tmp_path / f"curves.{ending}").read_bytes()
    assert content.startswith(start)
    if ending == "pdf":
        assert b"/FontFile2" in content and b"/Type3" not in content  # TrueType, as publishers ask


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "curve"}, "kind = 'curve' is unknown; did you mean curves?"),
        ({"width": "wide"}, "width = 'wide' is unknown"),
        ({"metric": "acuracy"}, "no run has recorded a number 'acuracy'; did you mean accuracy?"),
        ({"metric": "round"}, "no run has recorded a number 'round'"),
        ({"kind": "target", "target": float("nan")}, "the target is nan; give a finite number"),
        ({"out": "curves.doc"}, "-o curves.doc: a figure is written as .pdf, .svg, .png"),
        ({"only": ["method=fedsamm"]}, "--only method=fedsamm: no run has it; did you mean fedsam?"),
        ({"only": ["colour=red"]}, "--only colour=red: write it as setting=value, with a setting of the recipe"),
    ],
)
def test_a_mistake_is_one_sentence(runs, options, sentence):
    with pytest.raises(RecipeError, match=r"^[^\n]*$") as caught:
        plot(runs, **options)
    assert sentence in str(caught.value)


def test_what_was_not_measured_is_said_with_the_command_that_measures(runs, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("recipe.toml", "metrics.jsonl"):
        (folder / name).write_bytes((runs / "fedavg-0" / name).read_bytes())
    for kind in ("flatness", "landscape"):
        with pytest.raises(RecipeError, match=f"run `fedflat {kind} {folder}` first"):
            plot(folder, kind=kind)
    with pytest.raises(RunError, match="no run is here"):
        plot(tmp_path / "nowhere")


def test_a_result_draws_the_same_line_as_the_command(runs):
    (line,) = read_lines([runs / "fedavg-0"])
    result = fedflat.Result(line.recipe, line.runs[0].history, None)
    ours, theirs = result.plot().get_lines()[0], fedflat.report.plot(result).axes[0].get_lines()[0]
    assert list(ours.get_ydata()) == list(theirs.get_ydata())
    assert (ours.get_color(), ours.get_linestyle()) == (theirs.get_color(), theirs.get_linestyle())


def test_the_command_draws(runs, tmp_path, monkeypatch, capsys):
    from fedflat.cli import app

    monkeypatch.chdir(tmp_path)
    app(["plot", str(runs)], standalone_mode=False)
    assert (tmp_path / "curves.pdf").exists() and "drawn to curves.pdf" in capsys.readouterr().out
