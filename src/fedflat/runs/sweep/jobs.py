"""Executes the runs of a sweep in parallel, each in its own process, which can be stopped and resumed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fedflat.engine import Scratch
from fedflat.errors import FedflatError, RunError, StoppedError
from fedflat.federation import DECODED_FOLDER
from fedflat.files import changeable, private_directory, read_whole, write_whole, written_to
from fedflat.recipe import Recipe
from fedflat.runs.lock import busy
from fedflat.runs.sweep.plan import BASE, Point, Sweep
from fedflat.runs.sweep.results import GO_ON, finished, save_result, unfinished

MEMORY = 2**30  # assumed memory of a run in bytes
DECODED = 2**30  # assumed size in bytes of the data sets that the runs share
POLL = 0.1  # seconds between two polls of the processes
AFTER = "after-{}.json"  # output of a command that follows a run
FEDFLAT = (sys.executable, "-P", "-m", "fedflat.cli")  # -P: nothing is imported from the current directory


def jobs_for(cores: int, runs: int, memory: int | None = None) -> int:
    """The number of parallel runs: one per core, limited by the number of runs and the memory in bytes.

    >>> jobs_for(cores=8, runs=20, memory=4 * 2**30), jobs_for(cores=8, runs=3, memory=None)
    (4, 3)
    """
    return max(1, min(cores, runs, cores if memory is None else memory // MEMORY))


def _scratch() -> Scratch | None:
    """A folder for the data sets that the runs share, in memory if there is room; None if it cannot be made."""
    try:
        return Scratch(DECODED)
    except RunError:
        return None


@dataclass
class Job:
    """A run in progress: the process of its current command, and the commands that are left."""

    point: Point
    folder: Path
    commands: deque[Sequence[str]]
    process: subprocess.Popen[bytes] | None = None
    doing: str = ""
    told: int = 0

    def advance(self, environment: dict[str, str]) -> bool:
        """Starts the next command. Returns False if there is none."""
        if not self.commands:
            return False
        command = self.commands.popleft()
        number = len(self.point.after) - len(self.commands)
        self.doing = self.point.after[number - 1].split()[0] if number else ""
        with ExitStack() as stack:
            stack.enter_context(written_to(self.folder, GO_ON))
            log = stack.enter_context(changeable(self.folder / "log.txt"))
            log.seek(0, os.SEEK_END)
            answer = stack.enter_context(changeable(self.folder / AFTER.format(number))) if number else log
            if number:
                answer.truncate()
            # A new session: otherwise an interrupt from the terminal would reach the process twice.
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=answer, stderr=log, start_new_session=True
            )
        return True

    def interrupt(self, times: int) -> None:
        """Sends interrupts until the process has received `times` of them."""
        while self.process and self.told < times:
            self.told += 1
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)

    def complaint(self, code: int) -> str:
        """The reason for a failure: the last line of the log, or the signal."""
        said = read_whole(self.folder / "log.txt").decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it printed nothing")
        return f"killed by signal {-code}" if code < 0 else last.removeprefix("fedflat: ")


@dataclass
class Jobs:
    """Executes a sweep in a directory.

    Args:
        sweep: the sweep.
        folder: its directory.
        jobs: number of parallel runs.
        workers: number of worker processes of each run, unless its recipe sets them.
        trust: whether the runs may load code from outside of fedflat.
    """

    sweep: Sweep
    folder: Path
    jobs: int
    workers: int
    trust: bool = False
    running: list[Job] = field(default_factory=list)
    done: list[Point] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    _signals: list[int] = field(default_factory=list)
    _decoded: Scratch | None = None

    def run(self, watch: Callable[[], None], told: Callable[[Point, str | None], None]) -> None:
        """Executes all runs that are not finished, and before them their base.

        A run that another process works on waits for it: the runs of a command that was killed go on without it.

        Args:
            watch: called at every poll.
            told: called with each point that ended, and the reason if it failed.

        Raises:
            StoppedError: a signal arrived, and the runs have saved their state.
        """
        left, base = unfinished(self.folder, self.sweep), self.sweep.base
        first = [base] if base and left and not finished(self.folder / BASE, base) else []
        missing = {point.slug for point in (*first, *left)}
        self.done = [point for point in self.sweep.runs if point.slug not in missing]
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        self._decoded = _scratch()
        try:
            for some in (first, left):
                if not self.failed:  # without their base, the others cannot start
                    self._run(deque(some), watch, told)
        finally:
            self._let_go()
            if self._decoded:
                self._decoded.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signals:
            so_far = f"stopped; {len(self.done)} of {len(self.sweep.runs)} runs are done"
            raise StoppedError(f"{so_far}; continue with the same command", self._signals[0])

    def _run(self, waiting: deque[Point], watch: Callable[[], None], told: Callable[[Point, str | None], None]) -> None:
        while self.running or (waiting and not self._signals):
            while len(self.running) < self.jobs and not self._signals and (point := self._next(waiting)):
                self._begin(point)
            for job in self.running:
                job.interrupt(len(self._signals))
            for job in [job for job in self.running if job.process and job.process.poll() is not None]:
                self._ended(job, told)
            watch()
            time.sleep(POLL)

    def _let_go(self) -> None:
        """Interrupts all runs and waits for them, so that none is left behind."""
        for job in self.running:
            job.interrupt(1)
        for job in self.running:
            if job.process:
                job.process.wait()

    def _next(self, waiting: deque[Point]) -> Point | None:
        """Takes the first run out of the queue that no other process works on."""
        point = next((point for point in waiting if not busy(self.folder / point.slug)), None)
        if point:
            waiting.remove(point)
        return point

    def _begin(self, point: Point) -> None:
        folder = self.folder / point.slug
        asked = folder / "asked.toml"
        with written_to(folder, "choose another --out"):
            private_directory(folder)
            write_whole(asked, f'preset = "none"\n{self._founded(point).to_toml()}'.encode())
        workers = () if point.recipe.engine.workers else ("--set", f"engine.workers={self.workers}")
        run = (*FEDFLAT, "run", str(asked), "--out", str(folder), "--resume", *workers, *self._trust)
        job = Job(point, folder, deque([run, *map(self._following(folder), point.after)]))
        job.advance(self._environment())
        self.running.append(job)

    def _founded(self, point: Point) -> Recipe:
        """The recipe of a run, which starts from the model of the base if there is one."""
        if not point.base:
            return point.recipe
        model = point.recipe.model.model_copy(update={"base": str((self.folder / BASE).absolute())})
        return point.recipe.model_copy(update={"model": model})

    def _following(self, folder: Path) -> Callable[[str], Sequence[str]]:
        def command(text: str) -> Sequence[str]:
            name, *options = shlex.split(text)
            return (*FEDFLAT, name, str(folder), *options, *self._trust, "--json")

        return command

    @property
    def _trust(self) -> Sequence[str]:
        return ("--trust",) if self.trust else ()

    def _environment(self) -> dict[str, str]:
        shared = {DECODED_FOLDER: str(self._decoded.path)} if self._decoded else {}
        return {**os.environ, "OMP_NUM_THREADS": str(self.workers), "COLUMNS": "120", **shared}

    def _ended(self, job: Job, told: Callable[[Point, str | None], None]) -> None:
        assert job.process is not None
        code = job.process.returncode
        if code == 0 and not self._signals and job.advance(self._environment()):
            return
        self.running.remove(job)
        stopped = bool(code or job.commands)
        if stopped and self._signals:
            return
        complaint = job.complaint(code) if stopped else self._save(job)
        if complaint:
            self.failed[job.point.slug] = complaint
        else:
            self.done.append(job.point)
        told(job.point, complaint)

    def _save(self, job: Job) -> str | None:
        """Saves the result of a run. Returns the reason if that fails."""
        answers = [job.folder / AFTER.format(number) for number in range(1, len(job.point.after) + 1)]
        try:
            save_result(job.folder, job.point, self.sweep.scale, answers)
        except (FedflatError, ValueError) as error:
            return str(error)
        return None

    def _note(self, number: int, _: FrameType | None) -> None:
        """Records a signal. The first lets each run finish its round and save; the second stops them at once."""
        self._signals.append(number)
