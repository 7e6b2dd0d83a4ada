"""Command to follow a running experiment: watch."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.app import JsonOption, app, out
from fedflat.errors import FedflatError, RunError
from fedflat.files import opened, read_rest

if TYPE_CHECKING:
    from fedflat.recipe import Recipe
    from fedflat.report.watch import Story


@app.command()
def watch(
    directory: Annotated[Path, typer.Argument(help="run directory; the run may start later")],
    every: Annotated[float, typer.Option(help="seconds between two reads", min=0.05)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print the current state and exit")] = False,
    as_json: JsonOption = False,
) -> None:
    """Follow a run of another process, or of another machine that shares the disk, until it ends.

    --json prints the current state and exits.
    """
    run = Followed(directory)
    if not (once or as_json):
        with suppress(KeyboardInterrupt):
            (_on_screen if out.is_terminal else _in_lines)(run, every)
        return
    run.look()
    if run.story is None:
        raise RunError(f"{directory}: no run is here yet; begin one, or let `fedflat watch {directory}` wait for it")
    if as_json:
        print(json.dumps(run.story.snapshot()))
        return
    from fedflat.report.watch import screen

    out.print(screen(run.story, out.width))


def _on_screen(run: "Followed", every: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from fedflat.report.watch import screen

    with Live(Text(f"waiting for a run in {run.directory}"), console=out, auto_refresh=False) as live:
        while True:
            run.look()
            if run.story:
                live.update(screen(run.story, out.width), refresh=True)
                if run.story.complete:
                    return
            time.sleep(every)


def _in_lines(run: "Followed", every: float) -> None:
    """Print a line for each look that found something new, after the problems of those rounds."""
    from fedflat.report.display import troubles
    from fedflat.report.watch import line

    begun = False
    while True:
        new = run.look()
        said = [trouble for record in new for trouble in troubles(record)] if begun else []
        if run.story and (new or not begun or run.story.complete):
            said.append(line(run.story))
        elif not begun:
            said.append(f"waiting for a run in {run.directory}")
        begun = True
        for text in said:
            out.print(text, markup=False, highlight=False, soft_wrap=True)
        if run.story and run.story.complete:
            return
        time.sleep(every)


class Followed:
    """A run's directory; each look reads only what was appended to the metrics since the last one.

    A line counts once it is complete. If lines that were already read have disappeared, because the run was resumed
    from an earlier checkpoint, reading starts over.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self._metrics = directory, directory / "metrics.jsonl"
        self.story: Story | None = None
        self._offset, self._last = 0, b""

    def look(self) -> list[dict[str, Any]]:
        """Read and return the new records; `story` is None while there is no run."""
        from fedflat.report.watch import Story

        try:
            silent = time.time() - self._metrics.stat().st_mtime
            # Check whether the run is over before reading the lines, or the last of them could be missed.
            over, recipe, lines = self._over(), self._recipe(), self._appended()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.directory}: cannot be read ({error.strerror}); give a run's directory") from None
        self.story = self.story or Story(str(self.directory), recipe)
        self.story.recipe, self.story.over, self.story.silent = recipe, over, max(silent, 0.0)
        records = [self._record(line) for line in lines]
        for record in records:
            self.story.add(record)
        return records

    def _appended(self) -> list[bytes]:
        with opened(self._metrics) as file:
            file.seek(self._offset - len(self._last))
            tail = read_rest(file)
            if not tail.startswith(self._last):
                self.story, self._offset, self._last = None, 0, b""
                file.seek(0)
                tail = read_rest(file)
        whole = tail[len(self._last) : tail.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        self._offset, self._last = self._offset + len(whole), lines[-1] if lines else self._last
        return lines

    def _record(self, line: bytes) -> dict[str, Any]:
        from fedflat.runs.record import read_record

        if record := read_record(line):
            return record
        raise RunError(
            f"{self._metrics}: holds a line that is not the record of a round: {line[:60]!r}; the file is damaged"
        )

    def _over(self) -> bool:
        """Whether the summary is that of the current metrics: an extended run has metrics newer than its summary."""
        with suppress(FileNotFoundError):
            return (self.directory / "summary.json").stat().st_mtime_ns >= self._metrics.stat().st_mtime_ns
        return False

    def _recipe(self) -> "Recipe":
        """Read the recipe at every look, because a run can be resumed with more rounds."""
        from fedflat.recipe import parsed, read_text, validated

        path = self.directory / "recipe.toml"
        try:
            return validated(parsed(read_text(path), str(path)))
        except (ValueError, FedflatError) as error:
            raise RunError(f"{path}: cannot be read ({error})") from None
