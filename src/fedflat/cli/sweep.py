"""Command to train a grid of recipes: sweep."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.app import JsonOption, SetOption, Spread, TrustOption, app, complain, err, names_in_package, out, show
from fedflat.errors import TrainingError

if TYPE_CHECKING:
    from fedflat.runs.sweep import Jobs, Point, Sweep


@app.command(cls=Spread)
def sweep(
    file: Annotated[
        str | None,
        typer.Argument(
            help="sweep file (TOML), or the name of one that comes with fedflat",
            autocompletion=names_in_package("recipes"),
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="parallel runs; 0 = what is fastest, within the memory", min=0)] = 0,
    scale: Annotated[str | None, typer.Option(help="a smaller scale defined in the file: laptop, tiny")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="select a part of the grid: --only method=fedavg --only seed=0")
    ] = None,
    set_: SetOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="directory; default sweeps/NAME[-SCALE]")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="only list the runs, and which are finished")] = False,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a grid of recipes in parallel, skip finished runs, and write one table of results.

    The same command continues a sweep that was stopped. Without FILE, lists the sweeps that come with fedflat.
    """
    from fedflat.files import private_directory, written_to
    from fedflat.runs.lock import RunLock
    from fedflat.runs.sweep import collect, load_sweep, refuse_other_settings, shipped, write_results

    if file is None:
        print("\n".join(shipped()))
        return
    whole = load_sweep(file, scale, set_ or [])
    plan = whole.only(only) if only else whole
    refuse_unknown_methods(plan)
    folder = out_dir or Path("sweeps") / (plan.name if scale is None else f"{plan.name}-{scale}")
    if dry:
        _list(plan, folder, as_json)
        return
    with written_to(folder, "choose another --out"):
        private_directory(folder)
        lock = RunLock(folder, "sweep")
    with lock:
        refuse_other_settings(folder, plan)
        try:
            failed = train_all(plan, folder, jobs, trust)
        finally:
            write_results(folder, collect(folder, whole))
    _show(plan, folder, as_json)
    if failed:
        logs = ", ".join(str(folder / slug / "log.txt") for slug in failed)
        raise TrainingError(f"{len(failed)} of {len(plan.runs)} runs failed; see {logs}")


def refuse_unknown_methods(plan: "Sweep") -> None:
    from fedflat.methods.parser import parse

    for method in {json.dumps(point.recipe.method): point.recipe.method for point in plan.runs}.values():
        parse(method)


def _list(plan: "Sweep", folder: Path, as_json: bool) -> None:
    from fedflat.runs.sweep.results import finished

    states = {point.slug: "done" if finished(folder / point.slug, point) else "to do" for point in plan.runs}
    if as_json:
        print(json.dumps(states, indent=2))
        return
    for slug, state in states.items():
        print(f"{state:5}  {slug}")


def train_all(plan: "Sweep", folder: Path, jobs: int, trust: bool) -> dict[str, str]:
    """Run everything that is left; return the error messages of failed runs."""
    from fedflat.engine.pool import cores
    from fedflat.files import free_memory
    from fedflat.runs.sweep import Jobs, fastest, jobs_for, unfinished

    left = max(1, len(unfinished(folder, plan)))
    workers = max(1, cores() // min(jobs or cores(), left))
    if not jobs:
        most = jobs_for(cores(), left, free_memory())
        (jobs, workers), rates = fastest(plan, folder, cores(), most, trust)
        if rates:
            tried = ", ".join(f"{n} × {w}: {rate:.3g}" for (n, w), rate in rates.items())
            err.print(f"runs at a time × workers, rounds/s: {tried}; taking {jobs} × {workers}", highlight=False)
    work = Jobs(plan, folder, jobs, workers, trust)
    with SweepProgress(work) as progress:
        work.run(progress.look, progress.ended)
    return work.failed


def _show(plan: "Sweep", folder: Path, as_json: bool) -> None:
    from fedflat.report.tables import summary_table
    from fedflat.runs.sweep import collect, summarised

    rows = summarised(collect(folder, plan))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if rows:
        show(summary_table(rows, f"{plan.name}, scale {plan.scale}: mean ± deviation over seeds"))
    out.print(f"written to {folder}: results.csv, results.jsonl, summary.csv", markup=False, highlight=False)


class SweepProgress:
    """Shows the whole sweep as one bar and each active run as another; prints lines without a terminal."""

    def __init__(self, work: "Jobs") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn(),
                   TextColumn("{task.fields[found]}"), TimeRemainingColumn(compact=True))  # fmt: skip
        self._work = work
        self._bars = Progress(*columns, console=err, refresh_per_second=4, disable=not err.is_terminal)
        self._total = sum(point.recipe.server.rounds for point in work.sweep.runs)
        self._whole = self._bars.add_task("rounds of all runs", total=self._total, found="")
        self._tasks: dict[str, Any] = {}
        self._looked = 0.0

    def __enter__(self) -> "SweepProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._looked = 0.0
        self.look()
        self._bars.stop()

    def look(self) -> None:
        """Read the progress of the runs, once a second."""
        from fedflat.runs.sweep.results import last_record

        if self._bars.disable or time.monotonic() - self._looked < 1:
            return
        self._looked = time.monotonic()
        going = {job.point.slug: job for job in self._work.running}
        for slug in self._tasks.keys() - going.keys():
            self._bars.remove_task(self._tasks.pop(slug))
        rounds = sum(point.recipe.server.rounds for point in self._work.done)
        for slug, job in going.items():
            if slug not in self._tasks:
                self._tasks[slug] = self._bars.add_task(f"  {slug}", total=job.point.recipe.server.rounds, found="")
            record = last_record(job.folder)
            metric = job.point.recipe.metric
            found = job.doing or ("" if record.get(metric) is None else f"{metric} {record[metric]:.4f}")
            self._bars.update(self._tasks[slug], completed=record.get("round", 0), found=found)
            rounds += record.get("round", 0)
        self._bars.update(self._whole, completed=rounds, found=self._count())

    def _count(self) -> str:
        failed = f", {len(self._work.failed)} failed" if self._work.failed else ""
        return f"{len(self._work.done)}/{len(self._work.sweep.runs)} runs{failed}"

    def ended(self, point: "Point", complaint: str | None) -> None:
        """Report that a run is done, or why it failed."""
        if complaint:
            complain(f"{point.slug}: {complaint}")
        elif self._bars.disable:
            err.print(f"{self._count()}: {point.slug} is done", markup=False, highlight=False, soft_wrap=True)
