"""Sweeps: a grid of recipes (plan), parallel runs (jobs) and a table of their results (results)."""

from fedflat.runs.sweep.jobs import Jobs, jobs_for
from fedflat.runs.sweep.plan import Point, Sweep, load_sweep, shipped
from fedflat.runs.sweep.results import collect, summarised, write_results

__all__ = ["Jobs", "Point", "Sweep", "collect", "jobs_for", "load_sweep", "shipped", "summarised", "write_results"]
