"""A run on disk: its recipe, its metrics, its model."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tomllib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from fedflat.errors import RecipeError, RunError
from fedflat.recipe import Recipe, validated
from fedflat.vector import Network

Record = dict[str, Any]


@dataclass
class RunFolder:
    """A run on disk: recipe.toml at once, metrics.jsonl round by round, the model and summary.json at the end."""

    path: Path
    recipe: Recipe

    def __post_init__(self) -> None:
        refuse_taken(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "recipe.toml", self.recipe.to_toml().encode())
            self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); choose another --out") from None

    def append(self, record: Record) -> None:
        self._metrics.write(json.dumps(record) + "\n")

    def finish(self, network: Network, summary: Record) -> None:
        tensors = {n: t.detach().contiguous() for n, t in network.module.state_dict().items()}
        # One key only: safetensors writes several in no fixed order, and equal runs shall be equal files.
        blob = safetensors_bytes(tensors, {"fedflat": json.dumps({"model": self.recipe.model.name})})
        versions = {"fedflat": version("fedflat"), "torch": torch.__version__, "python": platform.python_version()}
        digest = hashlib.sha256(blob).hexdigest()
        write_whole(self.path / "model.safetensors", blob)
        text = json.dumps({**summary, "model_sha256": digest, "versions": versions}, indent=2)
        write_whole(self.path / "summary.json", text.encode() + b"\n")
        self._metrics.close()


def refuse_taken(path: Path) -> None:
    """A directory that holds a round of a run is never written over."""
    metrics = path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise RunError(f"{path}: already holds a run; choose another --out")


def write_whole(path: Path, content: bytes) -> None:
    """All or nothing: a reader never finds half a file under the final name."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(content)
    aside.replace(path)


def read_run(directory: Path) -> tuple[Recipe, dict[str, Tensor]]:
    """The recipe and the model of a finished run, as they lie in its directory."""
    directory = Path(directory)
    recipe, model = directory / "recipe.toml", directory / "model.safetensors"
    if not recipe.is_file():
        raise RunError(f"{directory}: no run is here (no recipe.toml); give a directory that `fedflat run` wrote")
    if not model.is_file():
        raise RunError(f"{directory}: the run is not finished (no model.safetensors); let it finish first")
    try:
        # Not `recipe.load`: what a run wrote is complete, and the default recipe must not fill in what it left open.
        return validated(tomllib.loads(recipe.read_text("utf-8"))), load_file(model)
    except RecipeError as error:
        raise RecipeError(f"{recipe}: {error}") from None
    except SafetensorError as error:
        raise RunError(f"{model}: not a readable safetensors file ({error})") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{directory}: its recipe or model cannot be read ({error})") from None
