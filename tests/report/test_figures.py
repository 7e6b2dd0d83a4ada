"""The report's pictures: each from numbers whose picture is known."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedflat.flatness import Film, Landscape
from fedflat.recipe import load
from fedflat.report import figures
from fedflat.report.lines import Band, Line, Run


def record(round, **values):
    return {"round": round, "bytes_down": 3_000_000, "bytes_up": 1_000_000, "seconds": 0.5, **values}


def bowl(height, span=1.0):
    axis = np.linspace(-span, span, 5)
    values = 0.5 + height * (axis[:, None] ** 2 + 2 * axis[None, :] ** 2)
    return Landscape(np.stack([axis, axis]), values, 0.5)


def single(landscape):
    return Film([0], [landscape])


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_splits_picture_has_a_cell_for_each_class_that_a_client_holds(counts):
    (trace,) = figures.split(counts)["data"]
    assert trace["z"] == [[row[label] or None for row in counts] for label in range(3)]


def test_there_is_no_picture_of_classes_for_a_run_that_recorded_none():
    line = Line("a", [Run(Path("a"), load(None), [record(1, class_accuracy=[]), record(2, class_accuracy=[])])])
    assert figures.classes(line, 50) is None


def test_surfaces_share_one_scale_and_steep_ones_are_drawn_by_their_logarithm():
    one, two = figures.surfaces([single(bowl(1.0)), single(bowl(2.0, span=0.5))])
    for figure in (one, two):
        scene, surface = figure["layout"]["scene"], figure["forms"]["surface"]["trace"]
        assert scene["zaxis"]["range"] == [surface["cmin"], surface["cmax"]] == [0.5, 3.5]
        assert scene["xaxis"]["range"] == figure["forms"]["map"]["layout"]["xaxis"]["range"] == [-1.0, 1.0]
    assert one["frames"][0]["z"][0][2] == 0.5 + 2.0  # at α = 0, β = −1: the rows are β
    steep, _ = figures.surfaces([single(bowl(1000.0)), single(bowl(1.0))])
    assert steep["frames"][0]["z"][2][0] == pytest.approx(np.log10(1000.5), rel=1e-4)
    assert steep["layout"]["scene"]["zaxis"]["ticktext"] == ["1", "3", "10", "30", "100", "300", "1000", "3000"]


def test_accuracy_by_traffic_counts_what_was_sent_both_ways():
    line = Line("line", (Run(Path("run"), load(), [record(n, accuracy=n / 10) for n in (1, 2, 3)]),))
    (trace,) = figures.traffic([line], most=100)["data"]
    assert (trace["x"], trace["y"]) == ([4.0, 8.0, 12.0], [0.1, 0.2, 0.3])


def test_neighbouring_lines_differ_in_colour_and_dash():
    looks = [tuple(figures.style(place).values()) for place in range(35)]
    assert len(set(looks)) == 35
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks))


def luminance(colour):
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", ["#ffffff", "#171c22"])
def test_the_first_four_lines_stand_out_from_either_ground(ground):
    for colour in figures.COLOURS[:4]:
        light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 2.9


def test_one_curve_of_one_round_is_a_point():
    figure = figures.bands([(0, "a", Band([1], [0.5], [0.5], [0.5]))], "accuracy", most=10)
    assert [trace["mode"] for trace in figure["data"]] == ["markers"]
