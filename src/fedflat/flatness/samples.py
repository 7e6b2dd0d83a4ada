"""Batches of inputs and labels from arrays, data sets, loaders, dictionaries and federations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from fedflat.errors import DataError, RecipeError, printable, shortened
from fedflat.federation import Federation
from fedflat.flatness.federated import Portion
from fedflat.flatness.pairing import drawn

LABELS = ("labels", "label", "y", "targets", "target")
INPUTS = ("input_ids", "pixel_values", "x", "inputs", "input", "images", "image", "img", "features")
HELP = "pass collate=, a function that turns one batch into (inputs, labels)"

Collate = Callable[[Any], Any]


class Fields(dict[str, Tensor]):
    """The named inputs of a model, as in a dictionary of Hugging Face. A slice takes the same samples of each."""

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            return super().__getitem__(which)
        return Fields({name: tensor[which] for name, tensor in self.items()})

    def arguments(self, module: nn.Module) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The arguments for the module: by name where its `forward` has such names, otherwise the only input.

        Names that `forward` does not know are left out, as Hugging Face's Trainer does.
        """
        parameters = inspect.signature(module.forward).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return (), dict(self)
        if named := {name: tensor for name, tensor in self.items() if name in parameters}:
            return (), named
        known = [name for name in self if name in INPUTS] or list(self)
        if len(known) > 1:
            names = ", ".join(self)
            raise DataError(f"data: which of {names} the model takes is not clear from its forward; {HELP}")
        return (self[known[0]],), {}


def batches_of(
    data: Any, samples: int = 1000, batch: int = 100, seed: int = 0, collate: Collate | None = None
) -> list[tuple[Any, Tensor]]:
    """Fixes the samples to measure on, as a list of batches (inputs, labels).

    From arrays, a torch Dataset, or a DataLoader over one in plain or shuffled order, `samples` are drawn with the
    seed, so that two calls measure on the same ones. From a list of batches, or a loader with its own sampler, the
    first `samples` are taken in their order.

    Args:
        data: a pair of tensors or NumPy arrays, a torch Dataset, a DataLoader, a list of batches, a dictionary of
            arrays, or a `Federation`. A batch is (inputs, labels), a dictionary with `labels`, `label` or `y`, or a
            longer tuple with only one entry that can be the labels.
        samples: maximum number of samples; 0 takes all.
        batch: samples in a batch, where the data do not come in batches.
        seed: seed of the draw.
        collate: turns one batch of the data into (inputs, labels).

    Raises:
        DataError: there are no samples, or it is not clear what is an input and what a label.
        RecipeError: `samples` or `batch` is out of range.
    """
    if not all(isinstance(each, Integral) for each in (samples, batch)) or samples < 0 or batch < 1:
        told = f"samples = {samples!r} and batch = {batch!r}"
        raise RecipeError(f"{told}: give 0 for all samples, and batches of at least 1")
    if isinstance(data, Federation):
        return list(Portion(samples, seed, batch).batches(data, range(data.clients)))
    found, count = list[tuple[Any, Tensor]](), 0
    for raw in _raw(data, samples, batch, seed):
        inputs, labels = _halves(raw, collate)
        left = samples - count if samples else len(labels)
        found.append((inputs[:left], labels[:left]))
        count += len(found[-1][1])
        if samples and count >= samples:
            break
    if not count:
        raise DataError("data: there are no samples to measure on")
    return found


def _raw(data: Any, samples: int, batch: int, seed: int) -> Iterable[Any]:
    """The batches as they come, before inputs and labels are told apart."""
    if isinstance(data, DataLoader):
        return _of_loader(data, samples, seed)
    if isinstance(data, Mapping) or (isinstance(data, (tuple, list)) and data and all(map(_is_array, data))):
        return _of_arrays(data, samples, batch, seed)
    many = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if isinstance(data, (str, bytes, Tensor, np.ndarray)) or not many:
        kind = "an array without labels" if _is_array(data) else f"a {type(data).__name__} ({shortened(data, 40)})"
        raise DataError(f"data: is {kind}; give (inputs, labels), a Dataset, a DataLoader or a list of batches")
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and _of_single_samples(data):
        return _of_dataset(data, samples, batch, seed, default_collate)
    return _of_batches(data)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _of_single_samples(data: Any) -> bool:
    """Whether the entries are samples, not batches: a label is then one number or an array without length."""
    if not len(data):
        return False
    if not isinstance(data, (list, tuple)):
        return True  # a Dataset
    first = data[0]
    entries = list(first) if isinstance(first, (tuple, list)) else [first]
    if isinstance(first, Mapping):  # a batch may have a number beside its labels, such as that of the epoch
        entries = [first[name] for name in LABELS if name in first] or list(first.values())
    return any(not hasattr(entry, "__len__") or (_is_array(entry) and entry.ndim == 0) for entry in entries)


def _of_arrays(data: Any, samples: int, batch: int, seed: int) -> Iterator[Any]:
    entries = data if isinstance(data, Mapping) else dict(enumerate(data))
    try:
        tensors = {name: _tensor(entry) for name, entry in entries.items()}
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
    except TypeError:
        raise DataError(
            f"data: the entries {', '.join(map(str, entries))} must be arrays with a sample in each row"
        ) from None
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{length} in entry {name}" for name, length in lengths.items())
        raise DataError(f"data: the numbers of samples differ: {told}")
    indices = drawn(torch.arange(next(iter(lengths.values()), 0)), samples, seed)
    for some in indices.split(batch) if len(indices) else ():
        rows = {name: tensor[some] for name, tensor in tensors.items()}
        yield rows if isinstance(data, Mapping) else tuple(rows.values())


def _of_dataset(data: Any, samples: int, batch: int, seed: int, collate: Collate) -> Iterator[Any]:
    indices = drawn(torch.arange(len(data)), samples, seed)
    for some in indices.split(batch) if len(indices) else ():
        rows = [data[k] for k in some.tolist()]
        yield _collated(rows) if collate is default_collate else collate(rows)


def _collated(rows: list[Any]) -> Any:
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError, KeyError) as error:
        told = f"torch cannot batch these samples ({printable(error, 120)})"
        raise DataError(f"data: {told}; give batches, or a DataLoader with its own collate_fn") from None


def _of_loader(loader: DataLoader[Any], samples: int, seed: int) -> Iterable[Any]:
    """A loader in plain or shuffled order only says how to batch its data set; any other order is kept."""
    size = loader.batch_size
    if size is not None and type(loader.sampler) in (SequentialSampler, RandomSampler):
        if not hasattr(loader.dataset, "__len__"):
            raise DataError("data: the data set of the DataLoader has no length; give it a __len__")
        return _of_dataset(loader.dataset, samples, size, seed, loader.collate_fn)
    return _of_batches(loader)


def _of_batches(data: Iterable[Any]) -> Iterator[Any]:
    batches = iter(data)
    first = next(batches, None)
    if first is None:
        return
    yield from chain([first], batches)


def _halves(raw: Any, collate: Collate | None) -> tuple[Any, Tensor]:
    """One batch as inputs and labels."""
    if collate is not None:
        raw = collate(raw)
        if not isinstance(raw, (tuple, list)) or len(raw) != 2:
            raise DataError(f"data: collate must return (inputs, labels), and returned a {type(raw).__name__}")
    inputs, labels = _by_name(raw) if isinstance(raw, Mapping) else _by_place(raw)
    if isinstance(inputs, Mapping):
        inputs = Fields({str(name): _tensor(entry) for name, entry in inputs.items()})
        sizes = {len(entry) for entry in inputs.values()}
    else:
        inputs = _tensor(inputs)
        sizes = {len(inputs) if inputs.ndim else 0}
    labels = _tensor(labels)
    if sizes != {len(labels) if labels.ndim else 0}:
        count = len(labels) if labels.ndim else "one number as"
        raise DataError(f"data: a batch has inputs of {', '.join(map(str, sizes)) or 'no'} samples and {count} labels")
    return inputs, labels


def _by_name(raw: Mapping[str, Any]) -> tuple[Any, Any]:
    found = [name for name in LABELS if name in raw]
    if len(found) != 1:
        raise DataError(
            f"data: a batch has the entries {', '.join(map(str, raw))}, and one of them must be labels; {HELP}"
        )
    return {name: entry for name, entry in raw.items() if name != found[0] and _fits(entry)}, raw[found[0]]


def _fits(entry: Any) -> bool:
    return _is_array(entry) or (isinstance(entry, Sequence) and not isinstance(entry, str) and not _texts(entry))


def _texts(entry: Sequence[Any]) -> bool:
    return any(isinstance(each, str) for each in entry)


def _by_place(raw: Any) -> tuple[Any, Any]:
    """Inputs and labels of a pair, or of a longer tuple in which the labels are clear.

    Then exactly one entry after the first has a class for each sample, and no other could be an input.
    """
    if not isinstance(raw, (tuple, list)):
        raise DataError(f"data: a batch is a {type(raw).__name__} without labels; {HELP}")
    if len(raw) == 2:
        return raw[0], raw[1]
    arrays = [_tensor(entry) for entry in raw[1:] if _fits(entry)]
    classes = [a for a in arrays if a.ndim == 1 and not (a.is_floating_point() or a.is_complex())]
    if len(classes) != 1 or any(a.ndim > 1 for a in arrays):
        raise DataError(f"data: a batch has {len(raw)} entries, and which of them are the labels is not clear; {HELP}")
    return raw[0], classes[0]


def _tensor(entry: Any) -> Tensor:
    try:
        return entry if isinstance(entry, Tensor) else torch.as_tensor(_forward(entry) if _is_array(entry) else entry)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"data: a batch has an entry of type {type(entry).__name__} that is not an array; {HELP}"
        ) from None


def _forward(array: NDArray[Any]) -> NDArray[Any]:
    """The array, copied if it runs backwards through its memory, which torch cannot."""
    return array.copy() if any(stride < 0 for stride in array.strides) else np.asarray(array)
