"""The comparison with other frameworks: what its contenders share, and a contender that fails."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COMPETE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import engine
engine.adopt()
engine.SCRIPTS = Path(sys.argv[2])
begun = time.monotonic()
run = engine.compete("naive", sys.executable, Path("J2.json"), float(sys.argv[3]))
print(run, time.monotonic() - begun < 30, engine.descendants())
"""
LEFT = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '60'])\n"


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "contenders")
    return importlib.import_module("common")


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("benchmark_of_engines", BENCHMARKS / "engine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job_of(common, folder, shards):
    np.savez(
        folder / "data.npz",
        inputs=np.arange(12.0).reshape(6, 2),
        labels=np.arange(6),
        indices=np.concatenate(shards),
        offsets=np.cumsum([0, *map(len, shards)]),
    )
    job = common.Job.__new__(common.Job)
    object.__setattr__(job, "data", str(folder / "data.npz"))
    return job


@pytest.mark.parametrize("shards", [[[4, 2], [0, 1, 5], [3]], [[4, 2, 4], [0, 1, 5], [3, 3, 3]]])
def test_a_client_has_the_samples_of_its_indices(common, tmp_path, shards):
    job = job_of(common, tmp_path, shards)
    inputs, labels, found = job.arrays()
    clients = job.clients()
    assert [shard.tolist() for shard in found] == shards
    assert len(clients) == job.client_count() == len(shards)
    for client, shard in zip(clients, shards, strict=True):
        assert torch.equal(client.tensors[0], inputs[shard]) and torch.equal(client.tensors[1], labels[shard])
    # Copies of samples that clients share are made when they are asked for.
    assert isinstance(clients, list) == (sum(map(len, shards)) <= len(inputs))


def test_what_is_trained_leaves_out_what_is_frozen(common):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    common.fill(common.trained(model).values(), torch.arange(4.0))
    assert list(common.trained(model)) == ["1.weight", "1.bias"]
    assert model[1].weight.tolist() == [[0, 1, 2]] and model[1].bias.tolist() == [3]
    assert torch.equal(model[0].weight, before)


@pytest.mark.skipif(sys.platform != "linux", reason="it finds processes in /proc")
@pytest.mark.parametrize(
    ("rest", "patience", "told"),
    [
        ("sys.exit('no luck')", 50, "ended with 1\nno luck"),
        ("", 50, "ended with 0"),
        ("time.sleep(60)", 1, "no end within 1 s"),
    ],
)
def test_a_contender_that_fails_is_told_and_leaves_no_process(tmp_path, rest, patience, told):
    (tmp_path / "naive.py").write_text(LEFT + rest, "utf-8")
    command = [sys.executable, "-c", COMPETE, str(BENCHMARKS), str(tmp_path), str(patience)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "None True set()", done.stderr
    assert f"naive failed: {told}" in done.stderr


def test_every_job_has_a_check_that_its_contenders_agree(engine, common):
    jobs = importlib.import_module("jobs").JOBS
    assert {plan.model for plan in jobs.values()} == set(engine.CHECKS) == set(engine.MFLOP)
    assert set(engine.FIELDS) <= set(jobs) and set(engine.CHECKS.values()) <= set(jobs)


def test_a_page_without_a_run_of_ours(engine):
    job = {"name": "J10m", "images": "mnist", "model": "mlp", "cohorts": [[0], [1]]}
    run = {
        "job": "J10m", "contender": "naive", "turn": 0, "samples": [10, 10], "seconds": [2.0, 1.0], "cpu_seconds": 1.0,
        "first_round": 3.0, "pss_mb": 100.0, "loss_after_first_round": 2.0, "versions": {},
    }  # fmt: skip
    assert "| naive | 10 |  | 10 | 3.0 | 100 |" in engine.page([run], [1.0], {"J10m": job}, "")
