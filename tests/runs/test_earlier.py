"""Run directories of version 0.1 open, are measured, and go on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedflat.cli.app import app
from fedflat.runs import load_run

OLD = Path(__file__).parents[1] / "golden" / "run-0.1"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def fedflat(*arguments: object) -> str:
    outcome = CliRunner().invoke(app, [*map(str, arguments)])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_its_model_is_loaded(old):
    problem = load_run(old)
    recipe = problem.recipe
    assert recipe.method.startswith("feddyn(penalty=0.1")
    for name, tensor in load_file(old / "model.safetensors").items():
        assert torch.equal(problem.network.module.state_dict()[name], tensor)


def test_it_is_measured_and_reported_on(old):
    assert "sharpness" in fedflat("flatness", old, "--samples", 50)
    fedflat("report", old, "--out", old / "report.html")
    assert (old / "report.html").stat().st_size > 1000


def test_it_goes_on_from_its_checkpoint_to_the_same_end(old):
    ends = load_file(old / "model.safetensors")
    records = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    for name in ("model.safetensors", "summary.json"):
        (old / name).unlink()
    fedflat("resume", old)
    again = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    assert [record["accuracy"] for record in again] == [record["accuracy"] for record in records]
    for name, tensor in load_file(old / "model.safetensors").items():
        torch.testing.assert_close(tensor, ends[name], rtol=1e-5, atol=1e-6)
