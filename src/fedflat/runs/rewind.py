"""Returns a run on disk to one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedflat.runs.checkpoint import Checkpoints
from fedflat.runs.folder import DAMAGED, Record, RunFolder, read_recipe
from fedflat.runs.manifest import Checkpoint, checkpoint_rounds


def recalled(folder: RunFolder, found: Checkpoint | None, warn: Callable[[str], None]) -> list[Record]:
    """Cut the metrics off after a checkpoint; return the records before it.

    If the metrics are damaged, only the readable records are returned.
    """
    if found is None:
        return folder.rewind({"bytes": 0})
    if folder.agrees(found.manifest["metrics"]):
        return folder.rewind(found.manifest["metrics"])
    history = folder.salvage(found.round)
    warn(
        f"{folder.path / 'metrics.jsonl'}: is damaged, but the weights of round {found.round} are whole, so the run "
        f"continues from there; {found.round - len(history)} records could not be read; the file is kept as {DAMAGED}"
    )
    return history


def go_back(directory: Path, round: int, warn: Callable[[str], None], first: Callable[[int], None]) -> None:
    """Return a run to a kept checkpoint without training; what came after it is discarded.

    Args:
        directory: the run's directory.
        round: the round of the checkpoint.
        warn: called with each warning.
        first: called with the number of rounds that are discarded, before they are.

    Raises:
        RunError: if there is no such checkpoint, it is damaged, or the run is in use.
    """
    recipe = read_recipe(directory)
    with RunFolder(directory, recipe, resume=True, back_to=round) as folder:
        checkpoints = Checkpoints(directory, recipe, base=None)
        found = checkpoints.newest(folder.agrees, warn, round)
        first(max(checkpoint_rounds(directory)) - round)
        checkpoints.forget_after(round)
        recalled(folder, found, warn)
