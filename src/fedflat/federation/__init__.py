"""Data sets, their partition among clients, and training batches."""

from fedflat.federation.augment import Augment
from fedflat.federation.authors import splits_by
from fedflat.federation.datasets import Dataset, Samples, load
from fedflat.federation.population import Federation, batch_steps, federate
from fedflat.federation.sizes import load_npz
from fedflat.federation.splits import Floats

__all__ = [
    "Augment",
    "Dataset",
    "Federation",
    "Floats",
    "Samples",
    "batch_steps",
    "federate",
    "load",
    "load_npz",
    "splits_by",
]
