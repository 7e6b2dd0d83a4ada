"""Long runs and large federations: does memory grow with the rounds, or with the number of clients?

    python benchmarks/endurance.py --job rounds [--rounds 5000]
    python benchmarks/endurance.py --job clients [--clients 100000]

`rounds`: SCAFFOLD on a tiny MLP with 1,000 stateful clients, 10 per round, two workers, with metrics and checkpoints.
The resident memory of all processes may grow by less than 1 MB in 1,000 rounds, and their open files not at all.
`clients`: FedSMOO on the FedAvg-CNN, 20 rounds of 10 clients with a checkpoint every 5. All processes together stay
below 2 GB, and only clients that took part use disk space. It needs about 10 GB in TMPDIR.

Prints a Markdown table; exits 1 if a bound is missed. Reads /proc.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedflat import Dataset, Federation, Samples, train
from fedflat.runs.folder import Record

MB, GB = 2**20, 2**30
Row = tuple[str, str, str, bool]


def family() -> list[Path]:
    """This process and its workers, in /proc."""
    own = Path(f"/proc/{os.getpid()}")
    children = (own / f"task/{os.getpid()}/children").read_text().split()
    return [own, *(Path(f"/proc/{pid}") for pid in children)]


def resident(process: Path, kind: str = "VmRSS") -> int:
    """Bytes of memory that a process holds, or (VmHWM) the most that it ever held."""
    lines = (process / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def on_disk(paths: Iterable[Path]) -> int:
    """Bytes that files really take."""
    return sum(path.stat().st_blocks * 512 for path in paths if path.is_file())


def random_federation(clients: int, each: int, shape: tuple[int, ...]) -> Federation:
    """Clients with `each` of 2,000 random images; what is learnt does not matter here."""
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2000, *shape), generator=chance, dtype=torch.uint8)
    samples = Samples(images, torch.randint(0, 10, (2000,), generator=chance))
    held = Samples(images[:200], samples.labels[:200])
    shards = torch.randint(0, 2000, (clients, each), generator=chance).unbind()
    return Federation(Dataset("random", samples, held, 10, (0.5,), (0.25,)), shards)


# Rounds --------------------------------------------------------------------------------------------------------------


@dataclass
class Gauge:
    """Memory and open files of all processes, every so many rounds once the caches are warm."""

    every: int
    warm: int
    points: list[tuple[int, int, int]] = field(default_factory=list)

    def __call__(self, record: Record) -> None:
        if record["round"] >= self.warm and record["round"] % self.every == 0:
            processes = family()
            files = sum(len(os.listdir(process / "fd")) for process in processes)
            self.points.append((record["round"], sum(map(resident, processes)), files))

    @property
    def slope(self) -> float:
        """Megabytes in 1,000 rounds, by least squares."""
        rounds, held, _ = np.array(self.points, dtype=float).T
        return float(np.polyfit(rounds / 1000, held / MB, 1)[0])


def many_rounds(folder: Path, rounds: int) -> list[Row]:
    gauge = Gauge(every=max(rounds // 100, 1), warm=rounds // 5)
    federation, begun = random_federation(1000, 5, (1, 4, 4)), time.perf_counter()
    train(federation, "mlp", "scaffold", model_hidden=[8], rounds=rounds, epochs=1, cohort=10, batch=5,
          evaluation_every=50, engine="pool", workers=2, out=folder / "run", callbacks=[gauge])  # fmt: skip
    seconds, files = time.perf_counter() - begun, [count for *_, count in gauge.points]
    first, last = gauge.points[0], gauge.points[-1]
    return [
        ("rounds, ms each", f"{rounds:,}, {1000 * seconds / rounds:.1f}", "", True),
        ("memory of all processes, first and last, MB", f"{first[1] / MB:.1f}, {last[1] / MB:.1f}", "", True),
        ("growth in 1,000 rounds, MB", f"{gauge.slope:.3f}", "< 1", gauge.slope < 1),
        ("open files, fewest and most", f"{min(files)}, {max(files)}", "equal", min(files) == max(files)),
    ]


# Clients -------------------------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """The most that every process ever held, and what the clients' memory takes on the disk."""

    folder: Path
    held: dict[str, int] = field(default_factory=dict)
    disk: int = 0
    apparent: int = 0

    def __call__(self, record: Record | None = None) -> None:
        self.held |= {process.name: resident(process, "VmHWM") for process in family()}
        memory = [*self.folder.glob("fedflat-*/memory.*")]
        if memory:
            self.disk, self.apparent = on_disk(memory), sum(path.stat().st_size for path in memory)


def many_clients(folder: Path, clients: int) -> list[Row]:
    tempfile.tempdir = str(folder)
    peak, begun = Peak(folder), time.perf_counter()
    federation = random_federation(clients, 3, (1, 28, 28))
    result = train(federation, "fedavg-cnn", "fedsmoo", rounds=20, epochs=1, cohort=10, batch=3, evaluation_every=5,
                   engine="pool", workers=2, checkpoint_every=5, out=folder / "run", callbacks=[peak])  # fmt: skip
    peak()  # with what the last checkpoint took
    seconds = time.perf_counter() - begun
    touched = {client for record in result.history for client in record["cohort"]}
    row = 2 * 4 * sum(p.numel() for p in result.model.parameters())  # FedSMOO's clients keep two vectors
    saved = on_disk((folder / "run/checkpoints").iterdir())
    total, room = sum(peak.held.values()), 1.05 * len(touched) * row
    return [
        ("clients, that took part", f"{clients:,}, {len(touched)}", "", True),
        ("20 rounds, s", f"{seconds:.0f}", "", True),
        ("most memory of each process, GB", ", ".join(f"{held / GB:.2f}" for held in peak.held.values()), "", True),
        ("together, GB", f"{total / GB:.2f}", "< 2", total < 2 * GB),
        ("clients' memory as it seems, GB", f"{peak.apparent / GB:,.0f}", "", True),
        ("clients' memory on the disk, GB", f"{peak.disk / GB:.2f}", f"≤ {room / GB:.2f}", 0 < peak.disk <= room),
        ("checkpoints on the disk, GB", f"{saved / GB:.2f}", f"≤ {3 * room / GB:.2f}", saved <= 3 * room),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=["rounds", "clients"], required=True)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=100_000)
    options = parser.parse_args()
    jobs: dict[str, Callable[[Path, int], list[Row]]] = {"rounds": many_rounds, "clients": many_clients}
    with tempfile.TemporaryDirectory() as folder:
        rows = jobs[options.job](Path(folder), getattr(options, options.job))
    print("| what | value | bound | |\n|---|---|---|---|")
    for what, value, bound, good in rows:
        print(f"| {what} | {value} | {bound} | {('kept' if good else 'missed') if bound else ''} |")
    return 0 if all(good for *_, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
