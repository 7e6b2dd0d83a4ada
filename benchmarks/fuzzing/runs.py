"""A small run on disk, and those who read its files."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fedflat.cli.watch import Followed
from fedflat.errors import FedflatError
from fedflat.recipe import load
from fedflat.report.lines import read_lines
from fedflat.report.watch import screen
from fedflat.rounds import first_state
from fedflat.runs import load_run
from fedflat.runs.build import prepare
from fedflat.runs.checkpoint import Checkpoints
from fedflat.runs.experiment import execute
from fedflat.runs.export import export
from fedflat.runs.folder import RunFolder, read_model, read_recipe
from fedflat.runs.manifest import manifest_text
from fedflat.runs.rewind import recalled

TINY = ["method=scaffold", "model.hidden=[4]", "split.clients=3", "server.cohort=3", "server.rounds=2",
        "local.steps=1", "engine.name=inline", "engine.group=1", "checkpoint.every=1"]  # fmt: skip


def small_run(folder: Path) -> Path:
    """Two rounds of SCAFFOLD with three clients."""
    execute(prepare(load(None, TINY)), folder)
    return folder


def resealed(run: Path, name: str, content: bytes) -> bytes:
    """A forged file of a checkpoint whose digests are right again."""
    manifest = run / "checkpoints/00000002.json"
    with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError, UnicodeEncodeError):
        if name.endswith(".json"):
            tree = json.loads(content)
            tree.pop("sha256", None)
            return manifest_text(tree)
        tree, digest = json.loads(manifest.read_bytes()), hashlib.sha256(content).hexdigest()
        tree.pop("sha256", None)
        place = tree["server"] if "server" in name else tree["memory"][Path(name).name]
        place["sha256"] = digest
        manifest.write_bytes(manifest_text(tree))
    return content


def with_model(run: Path, model: bytes) -> None:
    """The digest of a forged model is in the summary."""
    path = run / "summary.json"
    summary = json.loads(path.read_bytes())
    path.write_bytes(json.dumps({**summary, "model_sha256": hashlib.sha256(model).hexdigest()}).encode())


def readers(files: Sequence[str]) -> list[Callable[[Path], str]]:
    """Who reads these files of a run."""
    if files[0].startswith("checkpoints"):
        return [newest, newest, checkpoint]
    return [followed, reported, continued] if files == ("metrics.jsonl",) else [model, recipe, finished, exported]


def newest(run: Path) -> str:
    """What a resumed run takes, with the clients' memory."""
    warned: list[str] = []
    found = Checkpoints(run, read_recipe(run)).newest(lambda mark: True, warned.append)
    assert found is not None
    first = first_state(PROBLEM)
    state = found.state(first)
    assert bool(state.weights.isfinite().all())
    for client, vectors in found.memory():
        assert isinstance(client, int) and vectors is not None
    return "the one before" if warned else "result"


def checkpoint(run: Path) -> str:
    load_run(run / "checkpoints/00000002.json")
    return "result"


def continued(run: Path) -> str:
    """The records that a resumed run keeps."""
    warned: list[str] = []
    with RunFolder(run, read_recipe(run), resume=True) as folder:
        found = Checkpoints(run, read_recipe(run)).newest(folder.agrees, warned.append)
        assert len(recalled(folder, found, warned.append)) <= 2
    return "some of it" if warned else "result"


def followed(run: Path) -> str:
    """`fedflat watch`."""
    story = Followed(run)
    story.look()
    assert story.story is not None
    json.dumps(story.story.snapshot())
    screen(story.story, 100)
    return "result"


def reported(run: Path) -> str:
    """`fedflat report`, up to the page."""
    from fedflat.report.page import collect

    for line in read_lines([run]):
        assert line
    collect([run], _status, False, None)
    return "result"


class _status:  # noqa: N801 - it stands for a function
    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def model(run: Path) -> str:
    tensors = read_model(run)
    assert tensors is not None
    return "result"


def recipe(run: Path) -> str:
    read_recipe(run)
    return "result"


def finished(run: Path) -> str:
    try:
        load_run(run)
    except FedflatError:
        raise
    return "result"


def exported(run: Path) -> str:
    """`fedflat export`, with its card."""
    with TemporaryDirectory() as folder:
        export(run, Path(folder) / "out", onnx=False)
    return "result"


PROBLEM = prepare(load(None, TINY))
