"""The animation of landscapes: a frame for each round, one scale, and sentences where it cannot be written."""

from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Film, Landscape
from fedflat.report.animation import at, check_animation, draw_animation


def bowl(height, span=1.0):
    axis = np.linspace(-span, span, 5)
    return Landscape(np.stack([axis, axis]), 0.5 + height * (axis[:, None] ** 2 + axis[None, :] ** 2), 0.5)


def test_a_gif_has_a_frame_for_each_round_of_any_run_and_the_runs_side_by_side(tmp_path):
    films = {"a": Film([0, 4], [bowl(1.0), bowl(2.0)]), "b": Film([0, 2, 4], [bowl(h) for h in (3.0, 2.0, 1.0)])}
    draw_animation(films, tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as seen:
        assert (seen.format, seen.n_frames, seen.size) == ("GIF", 3, (612, 333))
        frames = []
        for k in range(3):
            seen.seek(k)
            frames.append(np.asarray(seen.convert("L"), float))
    assert all(np.abs(one - two).max() > 50 for one, two in pairwise(frames))


def test_between_its_rounds_a_run_shows_the_last_one():
    film = Film([2, 6], [bowl(1.0), bowl(2.0)])
    assert [at(film, round) for round in (0, 2, 5, 6, 9)] == [film.landscapes[k] for k in (0, 0, 0, 1, 1)]


def test_what_cannot_be_animated_is_one_sentence(tmp_path, monkeypatch):
    films = {"a": Film([0], [bowl(1.0)]), "b": Film([0], [bowl(1.0, span=2.0)])}
    with pytest.raises(RecipeError, match="different grids"):
        draw_animation(films, tmp_path / "film.gif")
    with pytest.raises(RecipeError, match=r"film\.png: an animation is written as \.gif or \.mp4"):
        check_animation(tmp_path / "film.png")
    monkeypatch.setattr("matplotlib.animation.FFMpegWriter.isAvailable", lambda: False)
    with pytest.raises(RecipeError, match=r"film\.mp4: .* needs the program ffmpeg"):
        check_animation(tmp_path / "film.mp4")
    with pytest.raises(RunError, match="the animation cannot be written"):
        draw_animation({"a": Film([0], [bowl(1.0)])}, tmp_path / "no" / "film.gif")
