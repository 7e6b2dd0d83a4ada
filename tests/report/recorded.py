"""Runs that were never trained, as far as a report reads them."""

import json
from pathlib import Path

from fedflat.recipe import load
from fedflat.report.lines import Run


def record(round, **values):
    return {"round": round, "bytes_down": 3_000_000, "bytes_up": 1_000_000, "seconds": 0.5, **values}


def run_of(records, *settings, path="runs/1"):
    return Run(Path(path), load(None, settings), records)


def written(path, records, *settings):
    """The directory of a run."""
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(load(None, settings).to_toml())
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return path
