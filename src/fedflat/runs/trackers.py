"""Trackers: log a run to TensorBoard, MLflow or Weights & Biases while it trains."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from fedflat.errors import RecipeError, StoppedError
from fedflat.files import read_bytes, write_whole
from fedflat.recipe import Recipe
from fedflat.rounds import flat_record
from fedflat.runs.folder import Record

Ending = Literal["FINISHED", "KILLED", "FAILED"]
FOLDERS = {"tensorboard": "tensorboard", "mlflow": "mlruns", "wandb": "wandb"}  # where they write in a run's directory
LAST = "refused"  # every round has this metric, and it is written last


class Tracker(Protocol):
    """A logging backend. `id` identifies the run when it is resumed, and `round` is the last round it has."""

    id: str
    round: int

    def log(self, round: int, scalars: Mapping[str, float]) -> None: ...

    def conclude(self, summary: Record) -> None: ...

    def close(self, ending: Ending) -> None: ...


def check_trackers(recipe: Recipe, directory: Path | None) -> None:
    """Raises `RecipeError` if a tracker cannot be used, before anything is written."""
    if recipe.trackers and directory is None:
        raise RecipeError("trackers: they need a run directory; set out=, or leave the trackers out")
    for name in recipe.trackers:
        spec = find_spec(name)
        # A folder of that name, such as the one that wandb creates, looks like a package without an origin.
        if spec is None or spec.origin is None:
            raise RecipeError(f"trackers: {name} is not installed; pip install 'fedflat[{name}]'")


class Trackers:
    """The trackers of a run. Each round is logged once, even if the run is resumed. A tracker that fails is turned off.

    RUN/trackers.json stores for each tracker its id, the last logged round, and the rounds of its last summary.
    """

    def __init__(self, recipe: Recipe, run: Path, warn: Callable[[str], None]) -> None:
        self._file, self._warn = run / "trackers.json", warn
        self._pages: dict[str, Record] = {}
        with suppress(OSError, ValueError):
            self._pages = json.loads(read_bytes(self._file))
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(recipe.trackers):
            with self._forgiving(name):
                if (folder := run / FOLDERS[name]).is_symlink():  # in somebody else's run it may lead anywhere
                    raise RecipeError(f"{folder.name} is a symbolic link")
                tracker = self._open[name] = KINDS[name](run, recipe, self._pages.get(name, {}))
                self._note(name, id=tracker.id, round=tracker.round)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stopped = kind is not None and issubclass(kind, StoppedError | KeyboardInterrupt)
        for name, tracker in [*self._open.items()]:
            with self._forgiving(name):
                tracker.close("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")

    def __call__(self, record: Record) -> None:
        """Logs a round to the trackers that do not have it yet."""
        for name, tracker in [*self._open.items()]:
            if record["round"] > tracker.round:
                with self._forgiving(name):
                    tracker.log(record["round"], scalars(record))
                    tracker.round = record["round"]
                    self._note(name, round=tracker.round)

    def conclude(self, summary: Record) -> None:
        """Logs the summary at the end of the run."""
        for name, tracker in [*self._open.items()]:
            if summary["rounds"] > self._pages[name].get("summary", 0):
                with self._forgiving(name):
                    tracker.conclude(summary)
                    self._note(name, summary=summary["rounds"])

    def _note(self, name: str, **facts: Any) -> None:
        self._pages[name] = {**self._pages.get(name, {}), **facts}
        write_whole(self._file, json.dumps(self._pages).encode() + b"\n")

    @contextmanager
    def _forgiving(self, name: str) -> Iterator[None]:
        """Turns off a tracker that raises any error, so that training continues."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            self._warn(
                f"trackers: {name} is off, the run continues without it; a resumed run tries it again ({reason})"
            )


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a round, and the number of refused clients.

    >>> scalars({"round": 3, "loss": 0.5, "accuracy": None, "cohort": [1, 4], "refused": [{"client": 4}]})
    {'loss': 0.5, 'refused': 1.0}
    """
    numbers = {name: float(value) for name, value in flat_record(record).items() if isinstance(value, int | float)}
    return {**{n: v for n, v in numbers.items() if n != "round"}, LAST: float(len(record.get("refused", ())))}


def parameters(recipe: Recipe) -> dict[str, bool | int | float | str]:
    """The recipe as a flat table with names such as `local.lr`."""
    flat: Record = {}
    for name, value in recipe.model_dump(exclude_none=True).items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return {name: v if isinstance(v, bool | int | float | str) else json.dumps(v) for name, v in flat.items()}


class TensorBoard:
    """Event files in RUN/tensorboard, written with TensorBoard's own writer, which does not need TensorFlow."""

    def __init__(self, run: Path, recipe: Recipe, page: Record) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run / "tensorboard"
        self.id, fresh = "tensorboard", not folder.exists()
        self.round = 0 if fresh else _last_step(folder)
        self._writer = EventFileWriter(str(folder))
        if fresh:
            self._add(0, hparams_pb(parameters(recipe)))
            self._text("recipe", 0, f"```toml\n{recipe.to_toml()}```")

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(round, Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items()]))

    def conclude(self, summary: Record) -> None:
        rows = "".join(f"| {name} | {value} |\n" for name, value in summary.items())
        self._text("summary", summary["rounds"], f"| | |\n|---|---|\n{rows}")

    def close(self, ending: Ending) -> None:
        self._writer.close()

    def _text(self, tag: str, step: int, markdown: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, text_pb(tag, markdown))

    def _add(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


def _last_step(folder: Path) -> int:
    """The last round in the event files. A process may have been killed before it wrote trackers.json."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = (file for file in folder.glob("events.*") if file.is_file())  # reading a pipe would block
    found = (raw for file in files for raw in RawEventFileLoader(str(file)).Load())
    return max((int(Event.FromString(raw).step) for raw in found), default=0)


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in RUN/mlruns by default.

    MLflow's environment variables set the experiment, which is `fedflat` by default.
    """

    def __init__(self, run: Path, recipe: Recipe, page: Record) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI") or (run / "mlruns").resolve().as_uri()
        for variable, value in MLFLOW.items():
            os.environ.setdefault(variable, value)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=place)
        if "id" in page:
            self.id = page["id"]
            self._client.update_run(self.id, "RUNNING")
        else:
            self.id = str(self._client.create_run(self._experiment(), run_name=run.resolve().name).info.run_id)
            self._client.log_batch(self.id, params=[Param(name, str(v)) for name, v in parameters(recipe).items()])
        self.round = max((point.step for point in self._client.get_metric_history(self.id, LAST)), default=0)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedflat")
        found = self._client.get_experiment_by_name(name)
        known = os.environ.get("MLFLOW_EXPERIMENT_ID") or (found and found.experiment_id)
        return str(known or self._client.create_experiment(name))

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(name, v, now, round) for name, v in scalars.items()])

    def conclude(self, summary: Record) -> None:
        numbers = {f"summary/{name}": v for name, v in summary.items() if isinstance(v, int | float)}
        self.log(summary["rounds"], numbers)

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self.id, ending)


# A server that does not respond must not delay the rounds for minutes, a run without an address uses a local file
# store, and telemetry is off.
MLFLOW = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class WeightsAndBiases:
    """A W&B run in RUN/wandb, offline unless WANDB_MODE is set. `wandb sync` uploads it later."""

    def __init__(self, run: Path, recipe: Recipe, page: Record) -> None:
        import wandb

        self.id, self.round = page.get("id") or secrets.token_hex(8), page.get("round", 0)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedflat"),
            name=run.resolve().name,
            dir=run,
            id=self.id,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=parameters(recipe),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=round, commit=True)

    def conclude(self, summary: Record) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=int(ending != "FINISHED"))


KINDS: dict[str, Callable[[Path, Recipe, Record], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}
