"""Describes a run made in Python: tables of its recipe for what has a name, files beside the recipe for the rest.

`split.npz` holds the indices of each client, `data.safetensors` the samples, and `own_*.py` the classes of a notebook.
With these the command line can read, measure and resume the run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from fedflat.errors import DataError, FedflatError, RunError, nearest
from fedflat.federation import GIVEN, Dataset, Federation, Samples, known_datasets, saved_shards
from fedflat.files import read_whole, write_whole, written_to
from fedflat.models import OFFERED, written_layers
from fedflat.recipe import Recipe
from fedflat.rounds import Problem
from fedflat.runs.folder import Record, read_recipe
from fedflat.runs.own_classes import OwnCode
from fedflat.tasks import GIVEN as GIVEN_TASK

RECIPE, SPLIT, DATA = "recipe.toml", "split.npz", "data.safetensors"
LARGEST = 2**28  # bytes of samples that are kept with a run


def described(federation: Federation, begun: Path | None = None) -> Record:
    """The tables `data` and `split` of the recipe of a run on this federation.

    Args:
        federation: the clients and their samples.
        begun: the directory of a run to continue. Runs of 0.1 name neither the split nor the augmentation.
    """
    given = {"name": GIVEN, "clients": federation.clients}
    old = begun is not None and (begun / RECIPE).exists() and not (begun / SPLIT).exists()
    if begun is not None and old and read_recipe(begun).split.name == GIVEN:
        return {"data": {"name": federation.dataset.name}, "split": given}
    named, split = federation.tables()
    augment = {name: getattr(federation.augment, name) for name in federation.augment.__dataclass_fields__}
    data = named or {"name": federation.dataset.name, "by_length": federation.by_length, **augment}
    return {"data": {k: v for k, v in data.items() if v is not None}, "split": dict(split or given)}


def model_table(module: nn.Module, begun: Path | None = None) -> Record:
    """The table `model` of a module: its layers if these describe it fully, else the path of its class.

    Args:
        module: the network.
        begun: the directory of a run to continue, which may name the class of any module.
    """
    path = f"{type(module).__module__}:{type(module).__qualname__}"
    if begun is not None and (begun / RECIPE).exists() and read_recipe(begun).model.name == path:
        return {"name": path}
    layers = written_layers(module)
    return {"name": path} if layers is None else {"name": "sequential", "layers": layers}


def beyond_a_recipe(problem: Problem, federation: Federation, module: nn.Module | None) -> Iterator[str]:
    """Yield a sentence for each part of a run that neither its recipe nor a file next to it can hold."""
    if federation.tables()[0] is None and (size := _size(federation.dataset)) > LARGEST:
        yield (
            f"the data have {size:,} bytes and are not kept with the run; give the federation again to "
            "fedflat.Result.load(directory, federation), or save the data as an .npz file and name that "
            '(federate("arrays", directory=file))'
        )
    name = problem.recipe.model.name
    if module is not None and ":" in name and (why := _unbuildable(type(module), problem.recipe.model.options())):
        yield (
            f"the command line cannot build the model {type(module).__qualname__} ({why}); "
            "Result.load(directory, model=…) can read the run"
        )
    if problem.task.name == GIVEN_TASK:
        yield (
            "the loss or task was made in Python, and no recipe can name it; give Result.load(directory, task=…), "
            "or train with a name, such as task='classification(loss=package.module:MyLoss)'"
        )


def _unbuildable(kind: type[nn.Module], options: Record) -> str:
    """Why a class cannot be built from a recipe, or an empty text."""
    if kind.__module__.startswith("torch."):
        return "it has frozen parameters, hooks or layers that a list of PyTorch's layers does not tell"
    if "." in kind.__qualname__:
        return "its class is defined inside of a function or class; define it at the top of a module or notebook"
    try:
        parameters = inspect.signature(kind).parameters
        takes = {name: None for name in OFFERED if name in parameters} | dict.fromkeys(options)
        inspect.signature(kind).bind(**takes)
    except (TypeError, ValueError) as error:
        return f"{error}; say how it is built by model_options={{…}}"
    return ""


def keep(directory: Path, federation: Federation, own: Iterable[OwnCode] = ()) -> None:
    """Write what the recipe of a run cannot name to files beside it; existing files stay."""
    named, split = federation.tables()
    with written_to(directory, "choose another directory"):
        if split is None and not (directory / SPLIT).exists():
            federation.save(directory / SPLIT)
        if named is None and not (directory / DATA).exists() and _size(federation.dataset) <= LARGEST:
            write_whole(directory / DATA, _packed(federation.dataset))
        for code in own:
            if not (directory / code.file).exists():
                write_whole(directory / code.file, code.text.encode())


def _size(dataset: Dataset) -> int:
    return sum(tensor.nbytes for tensor in _tensors(dataset).values())


def _tensors(dataset: Dataset) -> dict[str, Tensor]:
    parts = {"train": dataset.train, "test": dataset.test}
    named = {f"{part}_{k}": getattr(s, k) for part, s in parts.items() for k in ("inputs", "labels", "groups")}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _packed(dataset: Dataset) -> bytes:
    facts = json.dumps(dataset.facts()).encode()
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in _tensors(dataset).items()}  # none is shared
    tensors |= {"facts": torch.frombuffer(bytearray(facts), dtype=torch.uint8)}
    return bytes(safetensors_bytes(tensors))


def read_data(path: Path) -> Dataset:
    """Read the samples that were kept with a run.

    Raises:
        RunError: if the file cannot be read, or does not hold samples.
    """
    try:
        tensors = from_safetensors(read_whole(path))
        facts = json.loads(tensors.pop("facts").numpy().tobytes())
        train, test = (
            Samples(tensors[f"{p}_inputs"], tensors[f"{p}_labels"], tensors.get(f"{p}_groups"))
            for p in ("train", "test")
        )
        return Dataset.of_facts(train, test, facts)
    except (DataError, RunError) as error:
        raise RunError(f"{path}: {error}") from None
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path}: does not hold the samples of a run ({type(error).__name__})") from None


Federated = Callable[[Recipe, Dataset | None, str | None], Federation]
"""Makes the federation of a recipe, with other data or another split if these are given."""


def kept_federation(recipe: Recipe, run: Path, federated: Federated) -> Federation | None:
    """The federation of a run from the files beside its recipe; None if the recipe names all of it.

    Args:
        recipe: the recipe of the run.
        run: the directory of the run.
        federated: makes the federation of a recipe.

    Raises:
        RunError: if the run was made in Python and its data or split are not beside it.
    """
    given = recipe.split.name == GIVEN
    held = (run / DATA).is_file()
    unknown = recipe.data.name not in known_datasets() and ":" not in recipe.data.name  # a class of the user's own
    if not given and not held and not unknown:
        return None
    if given and not (run / SPLIT).is_file():
        raise RunError(f"{run}: its federation was made in Python; give it to load_run(directory, federation)")
    if unknown and not held:
        hint = nearest(recipe.data.name, known_datasets())
        raise RunError(
            f"{run}: there is no data set {recipe.data.name!r}, and its data are not kept beside it; if its federation "
            f"was made in Python, give it to load_run(directory, federation); {hint}"
        )
    try:
        dataset = read_data(run / DATA) if held else None
        federation = federated(recipe, dataset, "iid" if given else None)
        if not given:
            return federation
        return Federation(
            federation.dataset,
            saved_shards(run / SPLIT, federation.dataset),
            federation.augment,
            by_length=federation.by_length,
        )
    except RunError:
        raise
    except FedflatError as error:
        raise RunError(f"{run}: {error}") from None
