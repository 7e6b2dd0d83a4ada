"""Tables of paths, trajectories, landscapes over the rounds, and rescalings."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from fedflat.flatness import Film, Interpolation, ScaleTest, Trajectory
from fedflat.report.flatness_table import titled_table
from fedflat.shown import Shown, written


def path_table(found: Mapping[str, Interpolation], measured: str) -> Table:
    """The ends of each path, its highest point and its barrier.

    Args:
        found: the paths by name.
        measured: the title, which says what was measured.
    """
    head = ("path", "loss at A", "at B", "highest", "barrier", "at α", "‖w_B − w_A‖")
    table = titled_table(measured, head)
    for name, each in found.items():
        ends = (f"{each.losses[0]:.4g}", f"{each.losses[-1]:.4g}", f"{each.losses.max():.4g}")
        table.add_row(name, *ends, f"{each.barrier:.4g}", f"{each.peak:.3g}", f"{each.distance:.4g}")
    return table


def trajectory_table(found: Trajectory, measured: str) -> Table:
    """The coordinates of the global models and of one round's clients, with their distances from the plane."""
    share = "" if found.shares[0] != found.shares[0] else " ({:.0%} and {:.0%} of the variance)".format(*found.shares)
    return _written(found, f"{measured}{share}")


def _written(found: Shown, title: str) -> Table:
    """The rows of a result as a table of the terminal."""
    rows = [*found.rows()]
    table = titled_table(title, [*rows[0]])
    for row in rows:
        table.add_row(*(written(row.get(name)) for name in rows[0]))
    return table


def film_table(found: Mapping[str, Film], measured: str) -> Table:
    """The loss and the largest rise around the first and the last model of each run."""
    table = titled_table(measured, ("run", "rounds", "loss, first", "last", "largest rise, first", "last"))
    for run, each in found.items():
        first, last = each.landscapes[0], each.landscapes[-1]
        rounds = ", ".join(map(str, each.rounds))
        table.add_row(run, rounds, *(f"{x:.4g}" for x in (first.centre, last.centre, first.rise, last.rise)))
    return table


def scale_table(found: ScaleTest, measured: str) -> Table:
    """Both models side by side, with the ratio of each number."""
    return _written(found, measured)
