"""Decoded data sets that several processes share: one decodes the files, and the others map its tensors.

The runs of a sweep are processes of their own. The sweep names a folder in the environment, and each named data set is
stored there once, in safetensors format. A process that maps it needs no extra memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fedflat.errors import FedflatError
from fedflat.federation.dataset import Dataset, Samples

if sys.platform != "win32":
    import fcntl

DECODED_FOLDER = "FEDFLAT_DECODED"  # the environment variable


def decoded_once(read: Callable[[], Dataset], *facts: object) -> Dataset:
    """Return a data set from the shared folder, or read it and store it there; without a folder just read it.

    Args:
        read: reads the data set.
        facts: everything that its content depends on.
    """
    folder = _private(os.environ.get(DECODED_FOLDER))
    if folder is None:
        return read()
    path = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.safetensors"
    with suppress(OSError), path.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait until the first has stored it
        if not path.exists():
            dataset = read()
            _store(dataset, path)
            del dataset
        return _mapped(path)
    return read()  # there is no room to store it


def _private(folder: str | None) -> Path | None:
    """The folder, if it exists and nobody else can write to it."""
    if not folder or sys.platform == "win32":
        return None
    try:
        found = os.stat(folder)
    except OSError:
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return Path(folder) if ours else None


def _store(dataset: Dataset, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    parts: dict[str, Samples] = {"train": dataset.train, "test": dataset.test}
    tensors: dict[str, Tensor] = {}
    for part, samples in parts.items():
        named = {f"{part}.{field.name}": getattr(samples, field.name) for field in fields(Samples)}
        tensors |= {name: tensor.contiguous() for name, tensor in named.items() if tensor is not None}
    about = {"about": json.dumps(dataset.facts())}
    aside = path.with_suffix(".part")
    try:
        save_file(tensors, aside, about)
        aside.rename(path)
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(str(error)) from None
    finally:
        aside.unlink(missing_ok=True)


def _mapped(path: Path) -> Dataset:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
            about: dict[str, Any] = json.loads(file.metadata()["about"])
        parts = {
            part: Samples(**{n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{part}.")})
            for part in ("train", "test")
        }
        return Dataset.of_facts(parts["train"], parts["test"], about)
    except (SafetensorError, KeyError, TypeError, ValueError, FedflatError) as error:
        raise OSError(f"{path}: is not a stored data set ({error})") from None
