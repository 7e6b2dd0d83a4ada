"""The picture of activity–weight duality."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedflat.drawing import COLOURS
from fedflat.errors import RunError
from fedflat.flatness import Duality, Pairing, dual
from fedflat.flatness.dual import _rows, binned, correlations, draw_duality
from fedflat.report.flatness_table import duality_columns


def pairing(directions=500, gap=0.0, **changed):
    falling = [1 / n for n in range(1, directions + 1)]
    still = dict(pairs=100, skipped=0, residual=0.0, mean_w=[0.0] * directions, mean_g=[0.0] * directions)
    moving = dict(sigma_w=falling, sigma_g=falling, correlation=[0.2] * directions)
    return Pairing(**still | moving | {"paired_gap": gap, "contribution": [0.2 * x * x for x in falling]} | changed)


def result(directions=500, **changed):
    return Duality(
        layer="2",
        train_samples=100,
        test_samples=100,
        train_loss=0.1,
        test_loss=0.4,
        missing=0,
        weight_norm=7.0,
        eigenvalues=[1 / n for n in range(1, directions + 1)],
        pairings={
            "train_to_test": pairing(directions, gap=-0.12, **changed),
            "test_to_train": pairing(directions, gap=0.31, **changed),
        },
    )


def colours(path):
    counted = Image.open(path).convert("RGB").getcolors(2**24)
    return {f"#{bytes(colour).hex().upper()}" for _, colour in counted}


def test_each_run_has_its_own_line(tmp_path):
    draw_duality({"fedavg": result(), "fedsam": result(3)}, tmp_path / "dual.png")
    assert set(COLOURS[:2]) <= colours(tmp_path / "dual.png")
    assert not set(COLOURS[2:-1]) & colours(tmp_path / "dual.png")


def test_negative_zero_and_single_values_can_be_drawn(tmp_path):
    odd = result(3, contribution=[-1.0, 0.0, 1e-9], sigma_w=[0.0, 0.0, 1.0])
    flat = result(1, contribution=[0.0], sigma_w=[0.0], sigma_g=[0.0])
    for drawn in ({"flat": flat}, {"odd": odd, "flat": flat}):
        draw_duality(drawn, tmp_path / "dual.png")
        assert set(COLOURS[: len(drawn)]) <= colours(tmp_path / "dual.png")


def test_every_panel_has_both_pairings_and_the_gap_is_drawn_beside_them(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(dual, "save_figure", lambda figure, path: drawn.append(figure))
    draw_duality({"fedavg": result(), "fedsam": result(3)}, tmp_path / "dual.png")
    (figure,) = drawn
    assert len(figure.axes) == 6
    for axes in figure.axes[:4]:
        assert [line.get_linestyle() for line in axes.get_lines() if line.get_linestyle() != "None"][:4] == [
            "-", "--", "-", "--",
        ]  # fmt: skip
    spread, sums = figure.axes[4:]
    assert [label.get_text() for label in spread.get_yticklabels()] == ["fedavg", "fedsam"]
    assert len(spread.containers) == 4 and len(sums.containers) == 8
    gaps = [line.get_xdata() for line in sums.get_lines() if line.get_color() == "black"]
    assert np.allclose(gaps, 0.3) and len(gaps) == 4
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told[2] == "fedavg: gap 0.3, of the pairs -0.12, 0.31"
    assert "train" in told[0] and "paper" in told[0]


def test_a_table_has_a_column_for_each_pairing_beside_the_gap():
    columns = duality_columns({"run fc2": result(2)})
    assert [*columns] == ["run fc2\ntrain → test", "run fc2\ntest → train"]
    paper, demo = columns.values()
    assert paper["gap: test − training loss"] == demo["gap: test − training loss"] == "0.3"
    assert (paper["gap of the pairs"], demo["gap of the pairs"]) == ("-0.12", "0.31")
    assert (demo["… Σ c σ_w σ_g"], demo["… Σ μ_w μ_g"], demo["Σ σ_w σ_g"]) == ("0.25", "0", "1.25")
    assert demo["c, mean ± deviation"] == "0.200 ± 0.000"


def test_directions_that_do_not_move_have_no_correlation_to_draw():
    found = correlations(pairing(3, sigma_w=[1.0, 0.0, 1.0]))
    assert np.isnan(found).tolist() == [False, True, False]
    n, means = binned(found)
    assert n.tolist() == [1, 3] and means.tolist() == [0.2, 0.2]


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300))
def test_bins_grow_and_hold_means(values):
    n, means = binned(values)
    assert n[:3].tolist() == [1, 2, 3][: len(values)] and means[:3].tolist() == values[:3]
    assert (np.diff(n) > 0).all() and n[-1] <= len(values)
    assert min(values) - 1e-9 <= means.min() and means.max() <= max(values) + 1e-9


def test_there_are_ten_bins_for_each_decade():
    n, means = binned(-np.arange(1.0, 201.0))
    assert n[-5:].tolist() == [89.5, 112.5, 142.0, 179.0, 200.0] and means.tolist() == (-n).tolist()
    assert len(n[(n >= 10) & (n < 100)]) == 10


def test_the_two_rows_of_each_run_stand_side_by_side_below_those_of_the_run_before():
    runs = {str(place): result(1) for place in range(len(COLOURS) + 1)}
    rows = _rows(runs)
    assert [height for height, *_ in rows[:4]] == pytest.approx([0.2, -0.2, -0.8, -1.2])
    assert [direction for _, _, direction, _ in rows[:2]] == ["train_to_test", "test_to_train"]
    assert [colour for _, colour, *_ in rows[::2]] == [*COLOURS, COLOURS[0]]
    assert [each for *_, each in rows[1::2]] == [*runs.values()]


def test_the_table_has_a_row_for_each_pairing():
    paper, demo = result(2).rows()
    assert (paper["pairing"], demo["pairing"]) == ("train to test", "test to train")
    assert (paper["gap of the pairs"], demo["gap of the pairs"], demo["pairs"]) == (-0.12, 0.31, 100)
    assert paper["gap"] == pytest.approx(0.3) and demo["Σ c σ_w σ_g"] == pytest.approx(0.25)


def test_what_cannot_be_drawn_or_written_is_said_in_one_sentence(tmp_path):
    with pytest.raises(RunError, match="no result to draw"):
        draw_duality({}, tmp_path / "dual.png")
    with pytest.raises(RunError, match="the figure cannot be written"):
        draw_duality({"a": result()}, tmp_path / "missing" / "dual.png")
