"""Experiments: from a recipe to a run folder and back, sweeps, verification, personalisation and export."""

from fedflat.runs.build import assemble, augmentation, gather
from fedflat.runs.claims import (
    Effect,
    Evidence,
    State,
    beside_best,
    load_claim,
    load_studies,
    shipped_claims,
    shipped_evidence,
    state_of,
)
from fedflat.runs.experiment import execute, train
from fedflat.runs.folder import Record, read_recipe
from fedflat.runs.launch import sharpness_portion
from fedflat.runs.loading import last_lr, load_run
from fedflat.runs.lock import RunLock
from fedflat.runs.manifest import checkpoint_rounds
from fedflat.runs.record import read_record
from fedflat.runs.result import Result, bare_method, summary
from fedflat.runs.rewind import go_back
from fedflat.runs.signals import CAUGHT
from fedflat.runs.sweep.grid import load_sweep, shipped
from fedflat.runs.sweep.overrides import NAME, flattened, spelled
from fedflat.runs.sweep.plan import FULL
from fedflat.runs.sweep.results import Row, columns, mean_and_std, noted, places, read_rows
from fedflat.runs.tune import read_tuned
from fedflat.runs.tune import rows as tuned_rows

__all__ = [
    "CAUGHT",
    "FULL",
    "NAME",
    "Effect",
    "Evidence",
    "Record",
    "Result",
    "Row",
    "RunLock",
    "State",
    "assemble",
    "augmentation",
    "bare_method",
    "beside_best",
    "checkpoint_rounds",
    "columns",
    "execute",
    "flattened",
    "gather",
    "go_back",
    "last_lr",
    "load_claim",
    "load_run",
    "load_studies",
    "load_sweep",
    "mean_and_std",
    "noted",
    "places",
    "read_recipe",
    "read_record",
    "read_rows",
    "read_tuned",
    "sharpness_portion",
    "shipped",
    "shipped_claims",
    "shipped_evidence",
    "spelled",
    "state_of",
    "summary",
    "train",
    "tuned_rows",
]
