"""Tables of paths, trajectories, landscapes over the rounds, and rescalings."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from fedflat.flatness import Film, Interpolation, ScaleTest, Trajectory
from fedflat.report.flatness_table import titled_table


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
    table = titled_table(f"{measured}{share}", ("model", "x", "y", "distance from the plane", "loss"))
    for round, (x, y), off, loss in zip(found.rounds, found.path, found.off, found.losses, strict=True):
        table.add_row(f"round {round}", f"{x:.4g}", f"{y:.4g}", f"{off:.3g}", f"{loss:.4g}")
    for client, (x, y), off in zip(found.clients, found.clients_path, found.clients_off, strict=True):
        table.add_row(f"client {client}, round {found.local_round}", f"{x:.4g}", f"{y:.4g}", f"{off:.3g}", "")
    if found.local_round:
        x, y = found.ends[1]
        table.add_row(f"average, round {found.local_round}", f"{x:.4g}", f"{y:.4g}", "", "")
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
    names = {
        "loss": "loss",
        "adaptive_sharpness": "sharpness, adaptive (scale-invariant)",
        "top_eigenvalue": "λ1",
        "ascent_sharpness": "sharpness, one ascent",
        "weight_norm": "‖w‖",
    }
    table = titled_table(measured, ("", "as trained", f"rescaled by {found.factor:g}", "ratio"))
    for name, title in names.items():
        old, new = getattr(found.before, name), getattr(found.after, name)
        table.add_row(title, f"{old:.5g}", f"{new:.5g}", f"{new / old:.5g}" if old else "–")
    table.add_row("largest change of an output", "", f"{found.outputs:.1e}", "")
    return table
