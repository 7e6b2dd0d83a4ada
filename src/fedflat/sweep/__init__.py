"""Sweeps: a grid of recipes (plan), its runs side by side (jobs), and a tidy table of them (results)."""

from fedflat.sweep.jobs import Jobs, jobs_for
from fedflat.sweep.plan import Point, Sweep, load_sweep, shipped
from fedflat.sweep.results import collect, summarised, write_results

__all__ = ["Jobs", "Point", "Sweep", "collect", "jobs_for", "load_sweep", "shipped", "summarised", "write_results"]
