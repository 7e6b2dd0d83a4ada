"""Functions in C, compiled on the machine that runs them, for what torch has no fast kernel.

Each library is one file beside this one. It is compiled at its first use, for this processor, by the C compiler that
`FEDFLAT_COMPILER` names (default: `cc`), and kept in the user's cache. Without a compiler, or with an empty
`FEDFLAT_COMPILER`, there is no library, and callers compute the same with torch. A compiler that the user has named and
that does not work is told by a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from platformdirs import user_cache_path

# Without -ffast-math: NaN and infinity are what they are in torch. The compiler still forms fused multiply-adds.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
NUMBERS = {
    torch.float32: ("-DREAL=float",),
    torch.float64: ("-DREAL=double",),
    torch.bfloat16: ("-DREAL=float", "-DBFLOAT16"),
}
PATIENCE = 60  # seconds for the compiler


@cache
def library(name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library of this name for this type of numbers; None if it cannot be had here.

    Args:
        name: the name of the file, without `.c`.
        dtype: the type of the numbers, which the file gets as macros.
    """
    if dtype not in NUMBERS:
        return None
    named = os.environ.get("FEDFLAT_COMPILER", "")
    compiler = shutil.which(os.environ.get("FEDFLAT_COMPILER", "cc"))
    found = compiler and _loaded(compiler, name, dtype)
    if named and not found:
        warnings.warn(f"FEDFLAT_COMPILER = {named!r} compiles nothing here, so torch computes it", stacklevel=2)
    return found or None


def _loaded(compiler: str, name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Load the library, which is compiled if it is not in the cache; None if that fails."""
    source = Path(__file__).with_name(f"{name}.c")
    command = [compiler, *FLAGS, *NUMBERS[dtype], str(source)]
    try:
        if kept := _kept(f"{name}-{_digest(source, command)}.so"):
            if not kept.exists():
                _make(command, kept)
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            made = Path(folder, "library.so")
            _run([*command, "-o", str(made), "-lm"])
            return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError):
        return None


def _make(command: list[str], kept: Path) -> None:
    """Compile under another name first: other processes must not find half a library."""
    with tempfile.TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as folder:
        made = Path(folder, "new.so")
        _run([*command, "-o", str(made), "-lm"])
        made.replace(kept)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)


def _digest(source: Path, command: list[str]) -> str:
    """Return a digest of all that decides what the compiler makes: source, command, compiler and processor."""
    compiler = Path(command[0]).resolve().stat()
    parts = [source.read_bytes(), *command, compiler.st_size, compiler.st_mtime_ns, platform.machine(), _processor()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return the name and the instructions of the processor: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.node()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _kept(name: str) -> Path | None:
    """Return a library's place in the cache; None if somebody else could write there, because it is run as code."""
    folder = user_cache_path("fedflat") / "compiled"
    if not folder.is_absolute():  # without a home directory
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        safe = not hasattr(os, "getuid") or (_own(folder) and all(map(_fixed, folder.parents[:2])))
    except OSError:
        return None
    return folder / name if safe and os.access(folder, os.W_OK) else None


def _own(folder: Path) -> bool:
    """Return whether nobody else can write to a folder."""
    state = folder.stat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o022


def _fixed(folder: Path) -> bool:
    """Return whether nobody else can put a folder of his own in the place of one of this user's.

    The group may write to it: with a umask of 002 that is the user's own.
    """
    state = folder.stat()
    return state.st_uid in (0, os.getuid()) and (not state.st_mode & stat.S_IWOTH or bool(state.st_mode & stat.S_ISVTX))
