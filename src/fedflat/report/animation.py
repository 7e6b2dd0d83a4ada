"""The landscapes of runs over their rounds as an animation, by matplotlib."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedflat.drawing import new_figure
from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Film, Landscape, Scale, check_comparable, draw_surface, steep

SPEED, DPI = 3, 90  # frames per second, pixels per inch


def check_animation(path: Path) -> None:
    """Checks that an animation can be written to this file.

    Raises:
        RecipeError: the suffix is neither .gif nor .mp4, ffmpeg is missing for .mp4, or matplotlib is missing.
    """
    _writer(path)


def _writer(path: Path) -> Any:
    try:
        from matplotlib.animation import FFMpegWriter, PillowWriter
    except ImportError:
        raise RecipeError("drawing needs matplotlib: pip install 'fedflat[plot]'") from None
    if path.suffix == ".gif":
        return PillowWriter(fps=SPEED)
    if path.suffix != ".mp4":
        raise RecipeError(f"{path}: an animation is written as .gif or .mp4")
    if not FFMpegWriter.isAvailable():
        raise RecipeError(
            f"{path}: writing .mp4 needs the program ffmpeg, which is not installed; write a .gif instead"
        )
    return FFMpegWriter(fps=SPEED)


def draw_animation(films: Mapping[str, Film], path: Path) -> None:
    """Writes the surfaces of all runs side by side, one frame for each round, with one camera and one scale.

    If a run has no landscape of a round, the frame shows its latest earlier one.

    Args:
        films: the landscapes of each run, by its name.
        path: the file to write, .gif or .mp4.

    Raises:
        RecipeError: the landscapes cannot be compared, or the file cannot be written on this machine.
        RunError: the file cannot be written.
    """
    writer = _writer(path)
    every = {
        f"{name}, round {round}": each
        for name, film in films.items()
        for round, each in zip(film.rounds, film.landscapes, strict=True)
    }
    check_comparable(every)
    scale = Scale.of(every, steep([*every.values()]))
    figure = new_figure(3.4 * len(films), 3.7)
    try:
        with writer.saving(figure, str(path), DPI):
            for round in sorted({round for each in films.values() for round in each.rounds}):
                _draw_frame(figure, {name: at(each, round) for name, each in films.items()}, round, scale)
                writer.grab_frame()
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the animation cannot be written ({error})") from None


def at(film: Film, round: int) -> Landscape:
    """The landscape of a round, or the latest earlier one; if there is none either, the first one."""
    return film.landscapes[max(0, bisect_right(film.rounds, round) - 1)]


def _draw_frame(figure: Any, landscapes: Mapping[str, Landscape], round: int, scale: Scale) -> None:
    figure.clear()
    figure.suptitle(f"round {round}")
    for place, (name, each) in enumerate(landscapes.items(), 1):
        axes = figure.add_subplot(1, len(landscapes), place, projection="3d")
        axes.set_title(f"{name}\nloss {each.centre:.3g}", fontsize="small")
        draw_surface(axes, each, scale)
