"""A trained model for others: safetensors, ONNX, the network's code, and a card that says what it is."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from fedflat.client import Problem
from fedflat.errors import RecipeError, RunError
from fedflat.federation.federation import Federation
from fedflat.folder import Record, beside, read_recipe, read_whole, write_whole, written_to
from fedflat.models import MODELS
from fedflat.models.source import source
from fedflat.prepare import load_run
from fedflat.recipe import Recipe
from fedflat.report.card import card


@dataclass(frozen=True)
class Signature:
    """What whoever uses a model must know of it; (x − mean)/std of an input x is what the network takes."""

    model: str
    options: Record
    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, problem: Problem, recipe: Recipe) -> Signature:
        data = problem.federation.dataset
        pixels = data.train.inputs.dtype == torch.uint8
        mean, std = data.mean or (0.0,), data.std or (1.0,)
        dtype = problem.network.weights.dtype
        return cls(recipe.model.name, recipe.model.options(), data.shape, data.classes, mean, std, pixels, dtype)

    @property
    def name(self) -> str:
        """What an input is called."""
        return "images" if self.pixels else "inputs"

    @property
    def meaning(self) -> str:
        """What its numbers are."""
        return "numbers in [0, 1] (bytes divided by 255)" if self.pixels else "numbers as in the data set"

    def table(self) -> Record:
        """As metadata of the files."""
        facts = {"model": self.model, "options": self.options, "classes": self.classes, "shape": self.shape}
        return {**facts, "input": self.meaning, "mean": self.mean, "std": self.std}


class Normalised(nn.Module):
    """A network with its normalisation inside."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.network = network
        along = (-1, 1, 1) if len(signature.shape) == 3 else (-1,)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(signature, name), dtype=signature.dtype)
            self.register_buffer(name, values.view(along))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network((x - self.mean) / self.std)
        return y


def export(
    run: Path, out: Path | None = None, onnx: bool = True, federation: Federation | None = None
) -> dict[Path, int]:
    """Write a run's model, or that of a checkpoint's manifest, for use elsewhere: each file with its size.

    A run whose federation was made in Python needs it here again.
    """
    out = out or beside(run, "export")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: is there already; choose another directory by -o")
    if onnx and not (find_spec("onnx") and find_spec("onnxscript")):
        raise RecipeError(
            "an ONNX file needs two packages more: pip install 'fedflat[onnx]', or leave it out: --no-onnx"
        )
    if federation is None and read_recipe(run).split.name == "given":
        raise RunError(f"{run}: its federation was made in Python; there, call fedflat.export.export(…, federation=…)")
    problem, recipe = load_run(run, federation)
    signature, module = Signature.of(problem, recipe), problem.network.module
    files = {"model.safetensors": _safetensors(module, signature), "recipe.toml": _public(recipe).to_toml().encode()}
    if recipe.model.name in MODELS:
        files["network.py"] = source(recipe.model.name).encode()
    if onnx:
        files["model.onnx"] = onnx_bytes(module, signature)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files["README.md"] = card(problem.federation, _public(recipe), signature, standing(run), digests).encode()
    with written_to(out, "choose another directory by -o"):
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(out / name, content)
    return {out / name: len(content) for name, content in files.items()}


def standing(run: Path) -> Record:
    """The summary of a run; of a checkpoint what its manifest says under the same names."""
    if run.suffix != ".json":
        return dict(json.loads(read_whole(run / "summary.json")))
    manifest = json.loads(read_whole(run))
    return {"rounds": manifest["round"], "accuracy_last": manifest["accuracy"]}


def _public(recipe: Recipe) -> Recipe:
    """The recipe without the places of the machine that it ran on."""
    data = recipe.data.model_copy(update={"dir": None})
    split = recipe.split.model_copy(update={"name": Path(recipe.split.name).name})  # it may be that of a file
    engine = recipe.engine.model_copy(update={"address": None})
    return recipe.model_copy(update={"data": data, "split": split, "engine": engine})


def _safetensors(module: nn.Module, signature: Signature) -> bytes:
    tensors = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    # One key only: safetensors writes several in no fixed order, and equal models shall be equal files.
    return bytes(safetensors_bytes(tensors, {"fedflat": json.dumps(signature.table())}))


def onnx_bytes(network: nn.Module, signature: Signature) -> bytes:
    """The network with its normalisation as an ONNX file, for any number of samples at a time."""
    module = Normalised(network, signature).eval()
    example = torch.zeros(2, *signature.shape, dtype=signature.dtype)
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                input_names=[signature.name],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RunError(f"model {signature.model}: has no ONNX form ({reason}); leave it out by --no-onnx") from None
    assert program  # with dynamo there is one
    shape = program.model.graph.inputs[0].shape
    if shape is None or isinstance(shape[0], int):
        raise RunError(f"model {signature.model}: as ONNX it would take one batch size only; leave it out by --no-onnx")
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # the exporter's traceback of each node, with paths of this machine
    program.model.metadata_props["fedflat"] = json.dumps(signature.table())
    return bytes(program.model_proto.SerializeToString())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks: log, warnings, and the graphs that it prints when it gives up."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
