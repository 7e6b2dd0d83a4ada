"""Rounds on a second device, which refuses what an accelerator refuses: tensors and generators of another device.

The device (second/device.cpp) is the host's memory under another name. It shows that every vector is where it belongs
and that a local step does not wait for the device; it says nothing about speed or about CUDA's own kernels.
"""

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from platformdirs import user_cache_path
from torch.utils.cpp_extension import include_paths, library_paths

from fedflat.methods.catalogue import CATALOGUE

SECOND = Path(__file__).parent / "second"
STEPS = ["fedavg", "fedsam", "looksam", "fedasam", "fedsmoo", "fedsol", "man", "moon", "scaffold", "fedadamw", "muon"]
CASES = ["device", "dropout", "grouped", "augmented", "resumed", "adapters", "flat", *CATALOGUE]
CASES += [f"waits {method}" for method in STEPS]
CASES += [f"waits together {method}" for method in ("fedavg", "fedsam", "fedsmoo", "fedavg + man(0.0)")]
CASES += [f"{kernel}.__call__" for kernel in ("ChainStep", "ChainGradient", "DirectStep", "FusedUpdate")]
CASES += ["Rows.descend", "Rows.gradient", "HeadPass.at_head"]
CASES += [f"personal {how}" for how in ("finetune", "perfedavg", "knn", "local")]


@pytest.fixture(scope="module")
def library():
    """The compiled device, kept from run to run."""
    compiler = shutil.which("g++")
    if not compiler or not sys.platform.startswith("linux"):
        pytest.skip("the second device needs g++ on Linux")
    source = SECOND / "device.cpp"
    mark = sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = user_cache_path("fedflat") / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"second-device-{mark}.so"
    if not path.exists():
        aside = path.with_suffix(f".{os.getpid()}")
        paths = [f"-I{p}" for p in include_paths()] + [f"-L{p}" for p in library_paths()]
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(source), "-o", str(aside), *paths]
        done = subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
        if "Python.h" in done.stderr or "cannot find -l" in done.stderr:
            pytest.skip(f"the second device does not compile here: {done.stderr.splitlines()[0]}")
        assert not done.returncode, done.stderr[:2000]
        aside.rename(path)
    return path


@pytest.fixture(scope="module")
def told(library):
    """What became of each case."""
    command = [sys.executable, SECOND / "rounds.py", library]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert not done.returncode, done.stderr[-2000:]
    return {each["case"]: each["told"] for each in map(json.loads, done.stdout.splitlines())}


def test_rounds_on_the_second_device(told):
    """One test for all of them, because one process runs them all."""
    assert {case: why for case, why in told.items() if why} == {}
    assert {*told} == {*CASES} and len(told) == len(CASES)
