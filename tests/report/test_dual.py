"""The picture of activity–weight duality."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedflat.errors import RunError
from fedflat.flatness.duality import Duality
from fedflat.report.dual import COLOURS, binned, draw_duality


def result(directions=500):
    falling = [1 / n for n in range(1, directions + 1)]
    return Duality(
        layer="2",
        pairs=100,
        skipped=0,
        missing=0,
        gap=0.3,
        paired_gap=0.31,
        residual=0.0,
        weight_norm=7.0,
        eigenvalues=falling,
        mean_w=[0.0] * directions,
        mean_g=[0.0] * directions,
        sigma_w=falling,
        sigma_g=falling,
        correlation=[1.0] * directions,
        contribution=[x * x for x in falling],
    )


def colours(path):
    counted = Image.open(path).convert("RGB").getcolors(2**24)
    return {f"#{bytes(colour).hex().upper()}" for _, colour in counted}


def test_each_run_has_its_own_line(tmp_path):
    draw_duality({"fedavg": result(), "fedsam": result(3)}, tmp_path / "dual.png")
    assert set(COLOURS[:2]) <= colours(tmp_path / "dual.png")
    assert not set(COLOURS[2:-1]) & colours(tmp_path / "dual.png")


def test_negative_zero_and_single_values_can_be_drawn(tmp_path):
    odd = replace(result(3), contribution=[-1.0, 0.0, 1e-9], sigma_w=[0.0, 0.0, 1.0])
    flat = replace(result(1), contribution=[0.0], sigma_w=[0.0], sigma_g=[0.0])
    for drawn in ({"flat": flat}, {"odd": odd, "flat": flat}):
        draw_duality(drawn, tmp_path / "dual.png")
        assert set(COLOURS[: len(drawn)]) <= colours(tmp_path / "dual.png")


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300))
def test_bins_grow_and_hold_means(values):
    n, means = binned(values)
    assert n[:3].tolist() == [1, 2, 3][: len(values)] and means[:3].tolist() == values[:3]
    assert (np.diff(n) > 0).all() and n[-1] <= len(values)
    assert min(values) - 1e-9 <= means.min() and means.max() <= max(values) + 1e-9


def test_what_cannot_be_drawn_or_written_is_said_in_one_sentence(tmp_path):
    with pytest.raises(RunError, match="no result to draw"):
        draw_duality({}, tmp_path / "dual.png")
    with pytest.raises(RunError, match="the picture cannot be written"):
        draw_duality({"a": result()}, tmp_path / "missing" / "dual.png")
