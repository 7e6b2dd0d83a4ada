"""The first weights of a run, from the model of another one: `model.base` in a recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from torch import Tensor, nn

from fedflat.errors import RecipeError, RunError
from fedflat.files import read_whole
from fedflat.runs.folder import read_model

ROOM = 2**20  # maximum number of bytes of a file besides its tensors, for the header


def load_base(module: nn.Module, base: str, sha256: str | None = None) -> str:
    """Load the weights of a finished run, an export or a safetensors file into a module.

    Only tensors are read, never code. The file must hold exactly the module's tensors, and finite numbers.

    Args:
        module: the network, before it has adapters.
        base: the directory of a run or an export, or the path of a .safetensors file.
        sha256: the digest that the file must have, if it is known.

    Returns:
        The SHA-256 of the file.

    Raises:
        RecipeError: there is no such file, it is not the one that the recipe names, or it does not fit the network.
    """
    path = Path(base) / "model.safetensors" if Path(base).is_dir() else Path(base)
    if not path.is_file():
        what = "the run is not finished, or the directory holds none" if Path(base).is_dir() else "there is none"
        raise RecipeError(f"model.base = {base!r}: no model is here ({what}); give a run, an export or a .safetensors")
    try:
        content = _content(path, module)
        digest = hashlib.sha256(content).hexdigest()
        if sha256 is not None and digest != sha256:
            raise RecipeError(
                f"model.base = {base!r}: has the SHA-256 {digest[:12]}…, but model.base_sha256 says {sha256[:12]}…"
            )
        promised = (Path(base) / "summary.json").is_file()
        tensors = read_model(Path(base)) if promised else from_safetensors(content)
    except SafetensorError as error:
        raise RecipeError(f"model.base = {base!r}: not a readable safetensors file ({error})") from None
    except RunError as error:
        raise RecipeError(f"model.base: {error}") from None
    if any(".lora_" in f".{name}" for name in tensors):
        raise RecipeError(f"model.base = {base!r}: has adapters; `fedflat export` it, and take the merged model there")
    try:
        refuse_misfit(module, tensors, f"model.base = {base!r}", type(module).__name__)
    except RunError as error:
        raise RecipeError(str(error)) from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RecipeError(f"model.base = {base!r}: {name} holds numbers that are not finite")
    module.load_state_dict(tensors)
    return digest


def _content(path: Path, module: nn.Module) -> bytes:
    """Read a file that is not larger than the module's tensors in float64 can be."""
    most = 8 * sum(tensor.numel() for tensor in module.state_dict().values()) + ROOM
    if path.stat().st_size > most:
        raise RunError(f"{path}: has {path.stat().st_size:,} bytes, and this network's weights have at most {most:,}")
    return read_whole(path)


def refuse_misfit(module: nn.Module, tensors: Mapping[str, Tensor], source: str, network: str) -> None:
    """Refuse tensors whose names and shapes are not the module's.

    Args:
        module: the network.
        tensors: the tensors by name.
        source: where the tensors come from, for the error message.
        network: the name of the network, for the error message.

    Raises:
        RunError: with the first name that differs.
    """
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    for name in expected | found:
        if expected.get(name) != found.get(name):
            there, here = (tuple(s[name]) if name in s else "nothing" for s in (found, expected))
            raise RunError(
                f"{source} does not fit the recipe's model {network}: {name} is {there}, but should be {here}"
            )
