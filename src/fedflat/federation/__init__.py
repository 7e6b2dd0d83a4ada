"""Data sets, their partition among clients, and training batches."""

from fedflat.federation.augment import Augment
from fedflat.federation.authors import splits_by
from fedflat.federation.batching import batch_steps
from fedflat.federation.dataset import Dataset, Samples
from fedflat.federation.datasets import known_datasets, load
from fedflat.federation.decoded import DECODED_FOLDER
from fedflat.federation.federating import GIVEN, federate, saved_shards
from fedflat.federation.population import Federation
from fedflat.federation.raw_inputs import normalised_inputs, take_normalised, taking_raw
from fedflat.federation.sizes import check_array, load_npz, save_npz
from fedflat.federation.splits import Floats
from fedflat.federation.subwords import Subwords, read_subwords
from fedflat.federation.text import WORD, Tokenizer, tokenizer_table

__all__ = [
    "DECODED_FOLDER",
    "GIVEN",
    "WORD",
    "Augment",
    "Dataset",
    "Federation",
    "Floats",
    "Samples",
    "Subwords",
    "Tokenizer",
    "batch_steps",
    "check_array",
    "federate",
    "known_datasets",
    "load",
    "load_npz",
    "normalised_inputs",
    "read_subwords",
    "save_npz",
    "saved_shards",
    "splits_by",
    "take_normalised",
    "taking_raw",
    "tokenizer_table",
]
