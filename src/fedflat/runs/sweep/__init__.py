"""Sweeps: a grid of recipes (grid) and its runs (plan), in parallel (jobs), with a table of their results (results)."""

from fedflat.runs.sweep.grid import load_sweep, shipped
from fedflat.runs.sweep.jobs import Jobs, jobs_for
from fedflat.runs.sweep.plan import Point, Sweep
from fedflat.runs.sweep.results import collect, refuse_other_settings, summarised, unfinished, write_results
from fedflat.runs.sweep.throughput import fastest

__all__ = [
    "Jobs",
    "Point",
    "Sweep",
    "collect",
    "fastest",
    "jobs_for",
    "load_sweep",
    "refuse_other_settings",
    "shipped",
    "summarised",
    "unfinished",
    "write_results",
]
