"""Tuning: a space of settings, successive halving with equal budgets, and the search."""

from fedflat.runs.tune.halving import Rung, promoted, rungs, spent
from fedflat.runs.tune.optuna_storage import open_storage, to_optuna
from fedflat.runs.tune.search import Plan, final_sweep, search
from fedflat.runs.tune.space import Space, read_space, tuned_recipe
from fedflat.runs.tune.tuned import Trial, Tuned, read_tuned, rows

__all__ = [
    "Plan",
    "Rung",
    "Space",
    "Trial",
    "Tuned",
    "final_sweep",
    "open_storage",
    "promoted",
    "read_space",
    "read_tuned",
    "rows",
    "rungs",
    "search",
    "spent",
    "to_optuna",
    "tuned_recipe",
]
