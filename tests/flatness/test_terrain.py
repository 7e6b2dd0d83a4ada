"""Landscapes as pictures: how many panels, on which scale, and what happens to values that are not finite."""

import math
import struct
import sys

import numpy as np
import pytest

from fedflat.errors import RecipeError, RunError
from fedflat.flatness import terrain
from fedflat.flatness.landscape import Landscape
from fedflat.flatness.terrain import Scale, draw_landscapes, steep


def bowl(curvature, floor=0.1, dimensions=2, span=1.0, points=9):
    """½ c ‖v‖² above a floor."""
    axis = np.linspace(-span, span, points)
    square = axis**2 if dimensions == 1 else axis[:, None] ** 2 + axis**2
    return Landscape(np.tile(axis, (dimensions, 1)), floor + curvature / 2 * square, floor)


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([-1.0, 1.0], (-1, 1)),
        ([-3.0, -1.0, math.nan], (-3, -1)),
        ([-2.0, 0.0, math.inf], (-2, 0)),
        ([-3.0, -3.0], (-3.5, -2.5)),
        ([2.0, 2.0 + 1e-12], (1.5, 2.5)),
    ],
)
def test_a_scale_goes_from_the_least_to_the_largest_finite_loss_and_is_one_wide_for_a_constant(values, ends):
    found = Scale.of({"": Landscape(np.zeros((1, len(values))), np.array(values), 0.0)})
    assert found.ends == pytest.approx(ends)
    assert not found.logarithmic


def test_round_losses_on_a_logarithmic_scale_are_powers_of_ten_from_four_decades_on():
    assert Scale(1.0, 9e3, True).ticks()[1] == ["1", "3", "10", "30", "100", "300", "1000", "3000"]
    assert Scale(1.0, 1e5, True).ticks()[1] == ["1", "10", "100", "1000", "10000", "100000"]


def test_surfaces_are_steep_if_the_largest_loss_is_far_above_the_middle_of_one_and_none_is_zero():
    def made(*values):
        return Landscape(np.zeros((1, len(values))), np.array(values), values[0])

    flat = made(0.5, 3.0, 5.0)
    assert not steep([flat, made(1.0, 100.0, 119.0, math.inf)])
    assert steep([flat, made(1.0, 100.0, 121.0, math.nan)]), "40 times 3"
    assert steep([made(1.0, 100.0, 121.0), flat]) and not steep([made(1e-9, 3.0, 5.0)])
    for least in (0.0, -1.0):
        assert not steep([flat, made(least, 100.0, 121.0)]), "there is no logarithm"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws the landscapes; gives the figure and the size of its PNG file."""
    figures = []
    save = terrain.save_figure
    monkeypatch.setattr(terrain, "save_figure", lambda figure, path: (figures.append(figure), save(figure, path)))

    def draw(**landscapes):
        path = tmp_path / "terrain.png"
        draw_landscapes(landscapes, path)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1], struct.unpack(">II", content[16:24])

    return draw


def test_planes_stand_side_by_side_as_contours_above_surfaces_with_one_colour_bar(drawn):
    figure, (width, height) = drawn(fedavg=bowl(5.0), fedsam=bowl(1.0))
    above, below, (bar,) = figure.axes[:2], figure.axes[2:4], figure.axes[4:]
    assert [axes.get_title() for axes in above] == ["fedavg\nloss 0.1, rises by 5", "fedsam\nloss 0.1, rises by 1"]
    assert [axes.name for axes in below] == ["3d", "3d"]
    assert bar.get_ylabel() == "loss"
    assert 900 < width < 1500 and 800 < height < 1200


def test_all_planes_share_levels_colours_and_heights(drawn):
    figure, _ = drawn(flat=bowl(0.5), sharp=bowl(5.0))
    flat, sharp, *surfaces, _ = figure.axes
    assert np.array_equal(flat.collections[0].levels, sharp.collections[0].levels)
    assert flat.collections[0].get_clim() == sharp.collections[0].get_clim() == (pytest.approx(-1), math.log10(5.1))
    low, high = surfaces[0].get_zlim()
    assert (low, high) == surfaces[1].get_zlim() == (pytest.approx(-1), math.log10(5.1))
    assert surfaces[0].collections[0].get_clim() == surfaces[1].collections[0].get_clim() == (low, high)


@pytest.mark.parametrize(
    ("landscape", "ticks"),
    [
        (bowl(1.0), ["0.2", "0.4", "0.6", "0.8", "1"]),
        (bowl(5.0), ["0.1", "0.2", "0.5", "1", "2", "5"]),
        (bowl(100.0), ["0.1", "0.3", "1", "3", "10", "30", "100"]),
        (bowl(1e8), ["0.1", "10", "1000", "100000", "1e+07"]),
        (bowl(1e300, floor=1e-300), ["1e-300", "1e-200", "1e-100", "1", "1e+100", "1e+200", "1e+300"]),
        (bowl(5.0, floor=-1.0), ["-1", "0", "1", "2", "3", "4"]),
    ],
    ids=["less than a decade", "two decades", "three", "nine", "six hundred", "negative"],
)
def test_a_wide_range_of_losses_is_drawn_by_its_logarithm_with_round_ticks(landscape, ticks, drawn):
    figure, _ = drawn(run=landscape)
    *_, bar = figure.axes
    assert [label.get_text() for label in bar.get_yticklabels()] == ticks


def test_the_first_direction_points_to_the_right(drawn):
    axis = np.linspace(-1, 1, 9)
    slope = Landscape(np.tile(axis, (2, 1)), np.tile(2 + axis[:, None], (1, 9)), 2.0)
    figure, _ = drawn(slope=slope)
    lines = figure.axes[0].collections[1]
    for path, level in zip(lines.get_paths(), lines.levels, strict=True):
        assert path.vertices[:, 0] == pytest.approx(level - 2)


def test_curves_share_one_plot_with_a_line_for_each_run(drawn):
    runs = {f"run {k}": bowl(1.0 + k, dimensions=1) for k in range(9)}
    figure, (width, height) = drawn(**runs)
    (axes,) = figure.axes
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines[:9]}
    assert len(looks) == 9
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[:2] == ["run 0\nloss 0.1, rises by 0.5", "run 1\nloss 0.1, rises by 1"]
    np.testing.assert_allclose(10 ** axes.lines[8].get_ydata(), runs["run 8"].values)
    assert (width, height) == (1050, 630)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_what_is_not_finite_is_cut_and_the_scale_is_that_of_the_rest(dimensions, drawn):
    whole = bowl(1.0, dimensions=dimensions)
    values = whole.values.copy()
    values[0], values[1] = math.inf, math.nan
    holes = Landscape(whole.axes, values, whole.centre)
    figure, _ = drawn(whole=whole, holes=holes)
    if dimensions == 1:
        assert np.isnan(figure.axes[0].lines[1].get_ydata()).tolist() == [True] * 2 + [False] * 7
        assert figure.axes[0].get_ylim()[1] < 1
    else:
        left = min(path.vertices[:, 0].min() for path in figure.axes[1].collections[0].get_paths() if len(path))
        assert left == whole.axes[0][2]
        assert figure.axes[0].collections[0].get_clim() == pytest.approx((0.1, 1.1))


def test_a_constant_loss_is_a_plain(drawn):
    figure, _ = drawn(constant=bowl(0.0, floor=2.0))
    assert figure.axes[1].get_zlim() == (1.5, 2.5)
    drawn(constant=bowl(0.0, floor=2.0), sharp=bowl(100.0))  # crosses no level, and nothing warns


def test_what_cannot_be_compared_is_not_drawn(tmp_path):
    path = tmp_path / "terrain.png"
    nowhere = Landscape(bowl(1.0).axes, np.full((9, 9), math.nan), 0.1)
    for landscapes, sentence in (
        ({}, "there are none to draw"),
        (dict(a=bowl(1.0), b=bowl(1.0, span=2.0)), "b and a have different grids; measure both on the same grid"),
        (dict(a=bowl(1.0), b=bowl(1.0, dimensions=1)), "b and a have different grids"),
        (dict(a=bowl(1.0), b=nowhere), "b has no finite value; measure it with a smaller span"),
    ):
        with pytest.raises(RecipeError, match=f"landscapes: {sentence}"):
            draw_landscapes(landscapes, path)
    assert not path.exists()


def test_a_picture_that_cannot_be_written_and_a_missing_matplotlib_are_named(tmp_path, monkeypatch):
    with pytest.raises(RunError, match=r"terrain\.png: the figure cannot be written"):
        draw_landscapes(dict(a=bowl(1.0, dimensions=1)), tmp_path / "nowhere" / "terrain.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for dimensions in (1, 2):
        with pytest.raises(RecipeError, match=r"drawing needs matplotlib: pip install 'fedflat\[plot\]'"):
            draw_landscapes(dict(a=bowl(1.0, dimensions=dimensions)), tmp_path / "terrain.png")
