"""From data and a split to a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import RecipeError, SplitError, nearest, shortened
from fedflat.federation import authors, partition
from fedflat.federation.augment import Augment
from fedflat.federation.corpora import Cut
from fedflat.federation.dataset import Dataset
from fedflat.federation.datasets import OWNED, known_datasets, load
from fedflat.federation.hub_data import hub_dataset, is_hub_data
from fedflat.federation.packed import Packed
from fedflat.federation.partitioners import is_partitioner, partitioned
from fedflat.federation.places import expanded
from fedflat.federation.population import Federation, Origin
from fedflat.federation.splits import Shards
from fedflat.federation.user_data import Array, Test, is_array, is_own, own_dataset
from fedflat.randomness import numpy_generator
from fedflat.tokens import is_tokens

P = ParamSpec("P")
UNLABELLED = ("iid", "sizes", "natural")  # splits that ignore the labels
GIVEN = "given"  # the name of a split that only its indices describe


class Federate(Protocol, Generic[P]):
    """A function of data, a split and clients, which also takes arrays by position."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Federation: ...

    @overload
    def __call__(
        self, x_train: Array, y_train: Array, x_test: Array = ..., y_test: Array = ..., /, **options: Any
    ) -> Federation: ...


def by_position(function: Callable[P, Federation]) -> Federate[P]:
    """Let a function of data take x_train, y_train and optionally x_test, y_test as its first arguments."""

    @wraps(function)
    def call(*values: Any, **options: Any) -> Federation:
        if values and is_array(values[0]):
            options = _paired(values) | options
            values = ()
        elif values and isinstance(values[0], list | tuple) and len(values) > 1 and "split" in options:
            raise RecipeError(
                "federate: with data as lists, the second value is the split, which is also given by name; "
                "make the data arrays: federate(np.array(x), np.array(y), …)"
            )
        make: Callable[..., Federation] = function
        return make(*values, **options)

    return call


def _paired(arrays: tuple[Any, ...]) -> dict[str, Any]:
    """Arrays by position as the arguments `data` and `test`."""
    if len(arrays) == 1:
        raise RecipeError("federate: there are inputs without labels; give federate(x_train, y_train, x_test, y_test)")
    if len(arrays) not in (2, 4) or not all(map(is_array, arrays)):
        raise RecipeError(
            f"federate: {len(arrays)} values by position; give x_train, y_train, x_test, y_test, and the rest by name"
        )
    return {"data": arrays[:2]} | ({"test": arrays[2:]} if len(arrays) == 4 else {})


@by_position
def federate(
    data: Any = "digits",
    split: Any = None,
    clients: int | None = None,
    *,
    test: Test = 0.2,
    label: str | None = None,
    client: str | Sequence[Any] | None = None,
    columns: Sequence[str] | None = None,
    vocabulary: int = 0,
    image_size: tuple[int, int] | None = None,
    name: str | None = None,
    seed: int = 0,
    alpha: float | None = None,
    refill: bool | None = None,
    min_size: int | None = None,
    classes: int | None = None,
    shards: int | None = None,
    stratified: bool | None = None,
    sizes: Sequence[float] | None = None,
    exponent: float | None = None,
    draws: str = "fedflat",
    directory: str | Path | None = None,
    limit: int = 0,
    augment: Augment | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    normalise: bool = True,
    by_length: bool = False,
    window: int = 0,
    stride: int = 0,
    predict: Literal["next", "all"] = "next",
    words: int = 0,
    shortest: int = 0,
    half: int = 0,
    tokenizer: str | Path | None = None,
) -> Federation:
    """Load data and divide them among clients.

        federate("cifar10", "lda", clients=100, alpha=0.1)             a data set by name
        federate(x_train, y_train, x_test, y_test, split="iid")        arrays or tensors
        federate("wards.csv", label="outcome", client="ward")          a table, one client for each ward
        federate(torch_dataset, [[0, 1, 2], [3, 4]], test=other)       the indices of each client

    Args:
        data: the name of a data set, a `Dataset`, NumPy arrays or tensors (inputs, labels, and optionally those for
            testing), a torch Dataset or DataLoader, a `datasets.Dataset` or `DatasetDict` of Hugging Face or a folder
            of one, a pandas DataFrame, the path of a CSV file, or a folder of images `class/file.png`, optionally below
            `train` and `test`.
        split: the name of a split, the .npz file of a saved one, a list with the training indices of each client, or a
            partitioner of flwr-datasets. By default `natural` if `client` gives the owners, else `dirichlet`.
        clients: number of clients, by default 20; the split `natural` has one for each owner by default.
        test: the test samples in the same form as the data, or the share of the samples that is held out for testing.
        label: the column of a table that holds the labels.
        client: the column of a table that says who owns a sample, or an array with an owner for each training sample.
        columns: the columns of a table that are inputs; by default all others.
        vocabulary: the number of tokens, if inputs are token ids (integers, padded with −1 at the end of a row).
        image_size: height and width to which the images of a folder are resized.
        name: a name for your own data.
        seed: seed of the split and of what is held out.
        alpha: concentration (`dirichlet`, by default 0.1; `lda`).
        refill: draw with replacement (`dirichlet`).
        min_size: smallest client (`lda`).
        classes: number of classes of a client (`pathological`).
        shards: number of shards of a client (`shards`).
        stratified: equal shares of the classes (`iid`).
        sizes: relative sizes of the clients (`sizes`).
        exponent: power law of the sizes (`sizes`).
        draws: `fedflat` (our own draws) or the authors' draws to reproduce: `fedsol`, `fl-simulator` or `fedman`.
        directory: the directory of the data sets.
        limit: maximum number of training samples, drawn with the seed; 0 takes all.
        augment: augmentation of training batches; none by default.
        mean: mean of each channel; that of the data set by default.
        std: standard deviation of each channel; that of the data set by default.
        normalise: whether to apply mean and std. Bytes are scaled to [0, 1] in either case.
        by_length: whether batches hold texts of similar length.
        window: tokens of a sample of a named text; 0 takes the data set's default.
        stride: tokens between two windows; 0 means 1 for `next`, the window for `all`.
        predict: the token after a window, or the next one at every position of it.
        words: words in the vocabulary of a named text; 0 takes characters.
        shortest: characters that a role of `shakespeare` or a file of `text` must have.
        half: 1 or 2 for every second role of `shakespeare` or file of `text`; 0 takes all.
        tokenizer: a tokenizer.json, or a local folder of the hub with one, whose tokens a named text has.

    Raises:
        DataError: the data or the split's file cannot be read.
        RecipeError: the split or an option is unknown or invalid.
        SplitError: the split cannot be made from this data set.

    >>> federation = federate("digits", split="dirichlet", clients=20, alpha=0.1)
    >>> federation.clients, sum(federation.samples(i) for i in range(20)) == len(federation.dataset.train.labels)
    (20, True)
    """
    for option, number in (("clients", clients), ("seed", seed), ("limit", limit)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer | None):
            raise RecipeError(f"{option} = {shortened(repr(number))}: give a whole number")
    _check(augment, {"half": half, "shortest": shortest}, owned=isinstance(data, str) and data in OWNED)
    text: dict[str, Any] = {
        "window": window,
        "stride": stride,
        "predict": predict,
        "words": words,
        "shortest": shortest,
        "half": half,
        "tokenizer": "" if tokenizer is None else str(expanded(tokenizer).absolute()),
    }
    named: Mapping[str, Any] | None = None
    rows: Any = None  # the table of the training samples, which a partitioner of flwr-datasets may ask for
    if isinstance(data, Dataset):
        dataset = data.plain()
    elif is_hub_data(data) and data not in known_datasets():
        owner = client if isinstance(client, str) else None
        table: dict[str, Any] = {"label": label, "client": owner, "columns": columns, "vocabulary": vocabulary}
        dataset, rows = hub_dataset(data, test, **table, image_size=image_size, cut=Cut(**text), seed=seed)
    elif is_own(data):
        dataset = own_dataset(
            data, test, label=label, owner=client, columns=columns, vocabulary=vocabulary, size=image_size, seed=seed
        )
    else:
        dataset = load(data, directory, **text)
        place = None if directory is None else str(expanded(directory).absolute())
        named = {"name": data, "dir": place, "limit": limit, **text, "tokenizer": text["tokenizer"] or None}
    dataset = replace(dataset.limited(limit, seed) if limit else dataset, name=name or dataset.name)
    dataset = _normalised(dataset, normalise, mean, std)
    if by_length and not is_tokens(dataset.train.inputs):
        raise RecipeError(f"data.by_length = true: is for texts, and the samples of {dataset.name} are none")
    split = split if split is not None else "natural" if client is not None else "dirichlet"
    clients = clients if clients is not None else 0 if isinstance(split, str) and split == "natural" else 20
    options = {
        "alpha": alpha, "refill": refill, "min_size": min_size, "classes": classes, "shards": shards,
        "stratified": stratified, "sizes": sizes, "exponent": exponent,
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    if is_partitioner(split):
        held, tests = partitioned(split, dataset, None if limit else rows), None
    else:
        held, tests = _divided(dataset, split, clients, seed, draws, given)
    augment = augment or Augment()
    if named is not None:
        named = {**named, "normalise": normalise, "by_length": by_length, **asdict(augment)}
    packed = Packed.of(held)
    origin = Origin(dataset, packed, named, _table(split, len(held), seed, draws, given))
    return Federation(dataset, packed, augment, tests=tests, by_length=by_length, origin=origin)


def _check(augment: object, choices: Mapping[str, int], owned: bool) -> None:
    """Check the augmentation, and that the roles or files which options choose from are there."""
    if not isinstance(augment, Augment | None):
        raise RecipeError(f"augment: is a {type(augment).__name__}; give a fedflat.Augment")
    for option, choice in choices.items():
        if choice and not owned:
            known = " and ".join(OWNED)
            raise RecipeError(f"data.{option} = {choice!r}: only {known} have roles or files to choose from")


def _normalised(
    dataset: Dataset, normalise: bool, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> Dataset:
    if normalise:
        return replace(dataset, mean=mean or dataset.mean, std=std or dataset.std)
    return replace(dataset, mean=(0.0,) * len(dataset.mean), std=(1.0,) * len(dataset.std))


def _table(split: Any, clients: int, seed: int, draws: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """The split as a table of a recipe, if it has a name."""
    if not isinstance(split, str) or split.endswith(".npz"):
        return None
    return {"name": split, "clients": clients, "seed": seed, "draws": draws, **options}


def _divided(
    dataset: Dataset, split: Any, clients: int, seed: int, draws: str, options: dict[str, Any]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """The partition, and the local test sets if they belong to it."""
    if not isinstance(split, str):
        return _listed(split, dataset), None
    if split == GIVEN:
        raise SplitError("split = 'given': this federation was made in Python; pass it to fedflat.train again")
    if split.endswith(".npz"):
        return saved_shards(split, dataset), None
    held, tests = _drawn(dataset, split, clients, seed, draws, options)
    if split == "natural" and dataset.vocabulary:
        return _tensors(held), _of_owners(dataset, _tensors(held))
    return _tensors(held), None if tests is None else _tensors(tests)


def _drawn(
    dataset: Dataset, split: str, clients: int, seed: int, draws: str, options: dict[str, Any]
) -> tuple[Shards, Shards | None]:
    train = dataset.train
    if draws not in ("fedflat", *authors.DRAWS):
        raise RecipeError(f"split.draws = {draws!r} is unknown; {nearest(draws, ('fedflat', *authors.DRAWS))}")
    if draws != "fedflat":
        test = dataset.test.labels.numpy()
        return authors.divide(draws, split, train.labels.numpy(), clients, seed, test=test, **options)
    groups = None if train.groups is None else train.groups.numpy()
    if split not in UNLABELLED and (train.labels.ndim > 1 or train.labels.is_floating_point()):
        hint = "; or make them integers if they are classes" if train.labels.is_floating_point() else ""
        raise SplitError(f"{split}: the labels of {dataset.name} are not classes; take {' or '.join(UNLABELLED)}{hint}")
    chance = numpy_generator(seed, "partition")
    return partition.partition(split, train.labels.numpy(), clients, chance, groups=groups, **options), None


def _tensors(shards: Shards) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, shards))


def _of_owners(dataset: Dataset, shards: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The test samples of the owners whose training samples a client holds."""
    here, there = dataset.train.groups, dataset.test.groups
    if here is None or there is None:
        return None
    return tuple(torch.isin(there, here[shard].unique()).nonzero().flatten() for shard in shards)


def _listed(split: Any, dataset: Dataset) -> tuple[Tensor, ...]:
    """A list with the indices of each client, or a dictionary of them, as tensors."""
    lists = list(split.values()) if isinstance(split, Mapping) else split
    if not isinstance(lists, Sequence | np.ndarray | Tensor) or not len(lists):
        raise SplitError(
            f"split: is a {type(split).__name__}; give the name of a split, an .npz file, or a list with the indices "
            "of each client"
        )
    held = list[Tensor]()
    for client, indices in enumerate(lists):
        try:
            found = torch.as_tensor(np.asarray(indices))
        except (TypeError, ValueError):
            found = torch.zeros(1)
        if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
            raise SplitError(
                f"split: client {client} has a {type(indices).__name__}; give a list of whole numbers, its indices"
            )
        held.append(found.to(torch.int64).sort().values)
    return _fitting(held, dataset, "split")


def saved_shards(path: str | Path, dataset: Dataset) -> tuple[Tensor, ...]:
    """Reads a partition written by `fedflat split --save` and checks it against the data set."""
    return _fitting(_tensors(partition.load(path)), dataset, str(path))


def _fitting(shards: Sequence[Tensor], dataset: Dataset, source: str) -> tuple[Tensor, ...]:
    size = len(dataset.train.labels)
    for client, shard in enumerate(shards):
        if not len(shard):
            raise SplitError(f"{source}: client {client} holds no sample; give it one or leave it out")
        if int(shard.min()) < 0 or int(shard.max()) >= size:
            raise SplitError(
                f"{source}: not a split of the {size} training samples of {dataset.name}; "
                f"client {client} holds the samples {int(shard.min())} to {int(shard.max())}"
            )
    return tuple(shards)
