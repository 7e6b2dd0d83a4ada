"""Experiments: from a recipe to a run folder and back, sweeps, verification, personalisation and export."""

from fedflat.runs.build import assemble, augmentation, gather, last_lr, load_run, sharpness_portion
from fedflat.runs.checkpoint import checkpoint_rounds
from fedflat.runs.experiment import execute, train
from fedflat.runs.folder import Record, private_directory, read_recipe, read_whole, write_whole, written_to
from fedflat.runs.lock import RunLock
from fedflat.runs.record import read_record
from fedflat.runs.result import Result, summary
from fedflat.runs.rewind import go_back
from fedflat.runs.signals import CAUGHT
from fedflat.runs.sweep.overrides import flattened, spelled
from fedflat.runs.sweep.plan import FULL, load_sweep, shipped
from fedflat.runs.sweep.results import Row, mean_and_std

__all__ = [
    "CAUGHT",
    "FULL",
    "Record",
    "Result",
    "Row",
    "RunLock",
    "assemble",
    "augmentation",
    "checkpoint_rounds",
    "execute",
    "flattened",
    "gather",
    "go_back",
    "last_lr",
    "load_run",
    "load_sweep",
    "mean_and_std",
    "private_directory",
    "read_recipe",
    "read_record",
    "read_whole",
    "sharpness_portion",
    "shipped",
    "spelled",
    "summary",
    "train",
    "write_whole",
    "written_to",
]
