"""What several tests use: a tiny federation, and the real data where they are at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fedflat import Dataset, Federation, Samples, federate, trusted

# A busy machine must not fail a test: what an example may take is nobody's specification.
settings.register_profile("fedflat", deadline=None)
settings.load_profile("fedflat")

# Where the processor's AMX traps, bfloat16 must do without it; oneDNN learns that from the environment alone.
BF16 = "import torch; x = torch.ones(16, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
if "PYTEST_XDIST_WORKER" not in os.environ and subprocess.run([sys.executable, "-c", BF16]).returncode < 0:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

SHARED = Path(__file__).parents[2] / "shared" / "data"


# The files that take longest begin first: a worker gets whole files, and the last one decides when the tests end.
LONG = (
    "flower/test_processes.py", "engine/test_cluster.py", "methods/test_laws.py", "runs/test_export.py",
    "test_tutorials.py", "runs/test_sweep.py", "engine/test_engine.py", "rounds/test_measures.py",
    "engine/test_second_device.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One worker more than there are cores, for the time in which a test only waits; or as the environment says."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tests' networks are tiny: a second thread would only wait for the first."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test trusts code from outside for itself alone."""
    monkeypatch.setattr(trusted, "_packages", set())
    monkeypatch.setattr(trusted, "_anything", False)


@pytest.fixture(scope="session")
def digits() -> Federation:
    return federate("digits", "dirichlet", 8, alpha=0.3, seed=1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real data sets, or a skip."""
    folder = Path(os.environ.get("FEDFLAT_DATA") or SHARED)
    if not (folder / "cifar10").is_dir():
        pytest.skip("the real data sets are not here")
    return folder


@pytest.fixture
def regression() -> Federation:
    """Four clients with least-squares problems whose curvatures and optima differ; float64."""
    chance = torch.Generator().manual_seed(0)
    inputs, labels = [], []
    for client in range(4):
        scale = torch.linspace(0.3, 1.5, 3, dtype=torch.float64).roll(client)
        x = torch.randn(20, 3, generator=chance, dtype=torch.float64) * scale
        optimum = torch.randn(3, 1, generator=chance, dtype=torch.float64)
        inputs.append(x)
        labels.append(x @ optimum)
    samples = Samples(torch.cat(inputs), torch.cat(labels))
    shards = tuple(torch.arange(80).split(20))
    return Federation(Dataset("regression", samples, samples, 1, (), ()), shards, dtype=torch.float64)
