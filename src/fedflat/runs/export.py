"""Exports a trained model: safetensors, ONNX, the code of the network, and a model card."""

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

from fedflat.errors import RecipeError, RunError
from fedflat.federation import Federation
from fedflat.models import MODELS, is_adapted, merged, source
from fedflat.recipe import Recipe
from fedflat.rounds import Problem
from fedflat.runs.build import load_run
from fedflat.runs.card import card
from fedflat.runs.folder import Record, beside, read_recipe, read_whole, whole_model, write_whole, written_to


@dataclass(frozen=True)
class Signature:
    """What a user needs to know about a model. The network expects (x − mean)/std for an input x."""

    model: str
    options: Record
    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, problem: Problem) -> Signature:
        model, data = problem.recipe.model, problem.federation.dataset
        pixels = data.train.inputs.dtype == torch.uint8
        mean, std = data.mean or (0.0,), data.std or (1.0,)
        dtype = problem.network.weights.dtype
        return cls(model.name, model.options(), data.shape, data.classes, mean, std, pixels, dtype)

    @property
    def name(self) -> str:
        """The name of the input."""
        return "images" if self.pixels else "inputs"

    @property
    def meaning(self) -> str:
        """The meaning of the input's numbers."""
        return "numbers in [0, 1] (bytes divided by 255)" if self.pixels else "numbers as in the data set"

    def table(self) -> Record:
        """The metadata for the files."""
        facts = {"model": self.model, "options": self.options, "classes": self.classes, "shape": self.shape}
        return {**facts, "input": self.meaning, "mean": self.mean, "std": self.std}


class Normalised(nn.Module):
    """A network that normalises its inputs."""

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
    """Exports the model of a run or a checkpoint.

    Args:
        run: the directory of a run, or the manifest (.json) of a checkpoint.
        out: the directory to write; RUN/export by default. It must not exist or be empty.
        onnx: whether to write an ONNX file.
        federation: the federation, needed again if it was made in Python.

    Returns:
        The written files with their sizes in bytes.

    Raises:
        RecipeError: the packages for ONNX are not installed.
        RunError: the run cannot be read, the files cannot be written, or the model cannot be converted to ONNX.
    """
    out = out or beside(run, "export")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: already exists; choose another directory with -o")
    if onnx and not (find_spec("onnx") and find_spec("onnxscript")):
        raise RecipeError(
            "ONNX export needs two more packages: pip install 'fedflat[onnx]'; or leave it out: --no-onnx"
        )
    if federation is None and read_recipe(run).split.name == "given":
        raise RunError(
            f"{run}: its federation was made in Python; call fedflat.runs.export.export(…, federation=…) there"
        )
    problem = load_run(run, federation)
    recipe, signature, module = problem.recipe, Signature.of(problem), problem.network.module
    files = {"recipe.toml": _public(recipe).to_toml().encode()}
    if is_adapted(module):
        files["adapters.safetensors"] = _adapters(problem)
        module = merged(module)
    files["model.safetensors"] = _safetensors(module, signature)
    if recipe.model.name in MODELS:
        files["network.py"] = source(recipe.model.name).encode()
    if onnx:
        files["model.onnx"] = onnx_bytes(module, signature)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files["README.md"] = card(problem.federation, _public(recipe), signature, standing(run), digests).encode()
    with written_to(out, "choose another directory with -o"):
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(out / name, content, public=True)
    return {out / name: len(content) for name, content in files.items()}


def standing(run: Path) -> Record:
    """The summary of a run, or the same fields from the manifest of a checkpoint."""
    if run.suffix != ".json":
        return dict(json.loads(read_whole(run / "summary.json")))
    manifest = json.loads(read_whole(run))
    return {"rounds": manifest["round"], "accuracy_last": manifest["accuracy"]}


def _public(recipe: Recipe) -> Recipe:
    """The recipe without the paths and addresses of the machine it ran on."""
    data = recipe.data.model_copy(update={"dir": None})
    split = recipe.split.model_copy(update={"name": Path(recipe.split.name).name})  # the name may be a file's path
    engine = recipe.engine.model_copy(update={"address": None})
    model = recipe.model.model_copy(update={"base": recipe.model.base and Path(recipe.model.base).name})
    return recipe.model_copy(update={"data": data, "split": split, "engine": engine, "model": model})


def _safetensors(module: nn.Module, signature: Signature) -> bytes:
    # A single key, because safetensors writes several keys in no fixed order, and equal models must give equal files.
    return bytes(safetensors_bytes(whole_model(module), {"fedflat": json.dumps(signature.table())}))


def _adapters(problem: Problem) -> bytes:
    """The trained tensors alone, with the digest of the frozen ones that they belong to."""
    network, lora = problem.network, problem.recipe.model.lora
    tensors = {name: tensor.contiguous() for name, tensor in network.layout.views(network.weights).items()}
    facts = {"base_sha256": network.base_digest, "lora": lora.options() if lora else None}
    return bytes(safetensors_bytes(tensors, {"fedflat": json.dumps(facts)}))


def onnx_bytes(network: nn.Module, signature: Signature) -> bytes:
    """The network with its normalisation as an ONNX file, for any batch size."""
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
        raise RunError(
            f"model {signature.model}: cannot be converted to ONNX ({reason}); leave it out with --no-onnx"
        ) from None
    assert program  # dynamo always returns one
    shape = program.model.graph.inputs[0].shape
    if shape is None or isinstance(shape[0], int):
        raise RunError(
            f"model {signature.model}: as ONNX it would allow only one batch size; leave it out with --no-onnx"
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # the exporter stores a traceback for each node, with paths of this machine
    program.model.metadata_props["fedflat"] = json.dumps(signature.table())
    return bytes(program.model_proto.SerializeToString())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the exporter's output: log messages, warnings, and the graphs that it prints on failure."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
