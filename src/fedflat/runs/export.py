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
from torch import nn

from fedflat.errors import RecipeError, RunError
from fedflat.federation import Federation, Subwords, Tokenizer
from fedflat.files import read_whole, write_whole, written_to
from fedflat.models import MODELS, Normalised, is_adapted, merged, source
from fedflat.recipe import Recipe
from fedflat.rounds import Problem
from fedflat.runs.card import card
from fedflat.runs.folder import Record, beside, read_recipe, whole_model
from fedflat.runs.loading import load_run
from fedflat.runs.own_classes import kept_code
from fedflat.runs.record import is_summary, read_summary
from fedflat.runs.text_card import CONFIG, HUB, TOKENIZER, VOCABULARY, config_bytes, vocabulary_bytes


@dataclass(frozen=True)
class Signature:
    """What a user needs to know about a model. The network alone expects (x − mean)/std for an input x."""

    model: str
    options: Record
    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: bool
    dtype: torch.dtype
    vocabulary: int = 0
    per_token: bool = False
    tokenizer: Tokenizer | None = None
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, problem: Problem) -> Signature:
        model, data = _public(problem.recipe).model, problem.federation.dataset
        pixels = data.train.inputs.dtype == torch.uint8 and not data.vocabulary
        mean, std = data.mean or (0.0,), data.std or (1.0,)
        dtype = problem.network.weights.dtype
        tokens = data.vocabulary, problem.task.output == "tokens", data.tokenizer, data.labels
        return cls(model.name, model.options(), data.shape, data.classes, mean, std, pixels, dtype, *tokens)

    @property
    def name(self) -> str:
        """The name of the input."""
        return "tokens" if self.vocabulary else "images" if self.pixels else "inputs"

    @property
    def meaning(self) -> str:
        """The meaning of the input's numbers."""
        if self.vocabulary:
            where = f"in {VOCABULARY}" if self.tokenizer else "in the data set"
            return f"token ids from 0 to {self.vocabulary - 1} as {where}, −1 after the end of a row"
        return "numbers in [0, 1] (bytes divided by 255)" if self.pixels else "numbers as in the data set"

    @property
    def plain(self) -> bool:
        """Whether the network takes its inputs without normalisation."""
        return bool(self.vocabulary) or (not {*self.mean} - {0.0} and not {*self.std} - {1.0})

    @property
    def images(self) -> bool:
        return len(self.shape) == 3

    @property
    def language(self) -> bool:
        """Whether the network predicts the next token of a text."""
        return bool(self.vocabulary) and self.classes == self.vocabulary and not self.labels

    def normalised(self, network: nn.Module) -> nn.Module:
        """The network as a module that normalises its inputs itself."""
        return network if self.plain else Normalised(network, self.mean, self.std, self.images)

    def table(self, included: bool) -> Record:
        """The metadata of a file. `included` says whether its network normalises the inputs itself."""
        facts = {"model": self.model, "options": self.options, "classes": self.classes, "shape": self.shape}
        if self.vocabulary:
            return {**facts, "input": self.meaning, "vocabulary": self.vocabulary, "per_token": self.per_token}
        takes = "input" if included or self.plain else "(input - mean) / std"
        return {**facts, "input": self.meaning, "mean": self.mean, "std": self.std, "network_takes": takes}


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
    problem = load_run(run, federation)
    recipe, signature, module = problem.recipe, Signature.of(problem), problem.network.module
    files = {"recipe.toml": _public(recipe).to_toml().encode()}
    if is_adapted(module):
        files["adapters.safetensors"] = _adapters(problem)
        module = merged(module)
    files["model.safetensors"] = _safetensors(module, signature)
    if recipe.model.name == HUB:
        files[CONFIG] = config_bytes(module)
    if signature.tokenizer:
        files[VOCABULARY] = vocabulary_bytes(signature.tokenizer, signature.labels)
    if isinstance(signature.tokenizer, Subwords):
        files[TOKENIZER] = signature.tokenizer.definition.encode()
    if code := _code(run, recipe, signature):
        files["network.py"] = code.encode()
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
        return read_summary(run)
    manifest = json.loads(read_whole(run))
    found = {"rounds": manifest["round"], f"{read_recipe(run).metric}_last": manifest["accuracy"]}
    if not is_summary(found):
        raise RunError(f"{run}: is damaged; give another checkpoint")
    return found


def _code(run: Path, recipe: Recipe, signature: Signature) -> str:
    """The code of the network as far as it is known, and of its normalisation."""
    known = recipe.model.name if recipe.model.name in MODELS else None
    ours = source(known, not signature.plain) if known or not signature.plain else ""
    kept = kept_code(run.parent.parent if run.suffix == ".json" else run, recipe)
    return f"{kept}\n\n{ours}" if kept and ours else kept or ours


def _public(recipe: Recipe) -> Recipe:
    """The recipe without the paths and addresses of the machine it ran on."""
    tokenizer = recipe.data.tokenizer and Path(recipe.data.tokenizer).name
    data = recipe.data.model_copy(update={"dir": None, "tokenizer": tokenizer})
    split = recipe.split.model_copy(update={"name": Path(recipe.split.name).name})  # the name may be a file's path
    engine = recipe.engine.model_copy(update={"address": None})
    places = {"base": recipe.model.base, "folder": recipe.model.options().get("folder")}  # of a model of transformers
    model = recipe.model.model_copy(update={n: Path(place).name for n, place in places.items() if place})
    return recipe.model_copy(update={"data": data, "split": split, "engine": engine, "model": model})


def _safetensors(module: nn.Module, signature: Signature) -> bytes:
    # A single key, because safetensors writes several keys in no fixed order, and equal models must give equal files.
    return bytes(safetensors_bytes(whole_model(module), {"fedflat": json.dumps(signature.table(included=False))}))


def _adapters(problem: Problem) -> bytes:
    """The trained tensors alone, with the digest of the frozen ones that they belong to."""
    network, lora = problem.network, problem.recipe.model.lora
    tensors = {name: tensor.contiguous() for name, tensor in network.layout.views(network.weights).items()}
    facts = {"base_sha256": network.base_digest, "lora": lora.options() if lora else None}
    return bytes(safetensors_bytes(tensors, {"fedflat": json.dumps(facts)}))


def onnx_bytes(network: nn.Module, signature: Signature) -> bytes:
    """The network with its normalisation as an ONNX file, for any batch size."""
    module = signature.normalised(network).eval()
    example = torch.zeros(2, *signature.shape, dtype=torch.int64 if signature.vocabulary else signature.dtype)
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
    program.model.metadata_props["fedflat"] = json.dumps(signature.table(included=True))
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
