"""fedflat's engine compared with other frameworks on the same jobs, in turns: A, B, C, A, B, C, …

    FEDFLAT_DATA=… python benchmarks/engine.py --jobs J1=3 J2=3 J3=100 J3b=20 J4=3 J6=3 J7=3 J8=3 J9=3 J10=4
    python benchmarks/engine.py --jobs J3=50 --python flower=ENV/bin/python …

First every contender runs one round of a small job with each model, and the losses after it must agree. A framework
whose Python is not given gets its own environment in the cache folder. On J2 ours also runs in bf16, with one worker,
on Ray, and with FedSAM and FedSMOO (these are J5). J10 has 1,000 clients a round out of 10,000, J10c out of 100,000 and
J10m out of 1,000,000. A contender that ends with an error, runs out of memory or takes longer than --timeout is told as
"failed", and the others go on. Writes a Markdown page and a .json with every single run after each job, and a figure at
the end. Run it on an idle machine.
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from contenders.processes import adopt, descendants, end_family, first_to_end
from platformdirs import user_cache_path

Run = dict[str, Any]
SCRIPTS = Path(__file__).parent / "contenders"
CONTENDERS = ("naive", "flower", "pfl_research", "fedlab", "fluke", "ours")
VARIANTS = {
    "ours, bf16": "precision=bf16",
    "ours, one worker": "workers=1",
    "ours, fedsam": "method=fedsam",
    "ours, fedsmoo": "method=fedsmoo",
    "ours, on Ray": "engine=ray",
}
# Who runs what, where it is not the contenders alone.
BF16 = (*CONTENDERS, "ours, bf16")
# For each of its nodes, Flower's simulation looks through all messages of a round: 10⁸ looks a pass on J10c.
MANY = tuple(name for name in CONTENDERS if name != "flower")
FIELDS = {"J2": (*CONTENDERS, *VARIANTS), "J4": BF16, "J8": BF16, "J9": BF16, "J10c": MANY, "J10m": MANY}
CHECKS = {model: f"check-{model}" for model in ("cnn", "resnet", "lenet", "vgg", "lstm", "gpt")} | {"mlp": "check"}
AGREEMENT = 1e-4
TORCH = f"torch=={version('torch').partition('+')[0]}"
PACKAGES = {
    "flower": [TORCH, "flwr[simulation]==1.41.0"],
    "pfl_research": [TORCH, "pfl[pytorch]==0.6.0"],
    "fedlab": [TORCH, "fedlab==1.3.0"],
    "fluke": [TORCH, "fluke-fl==0.8.1"],
}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Forward, and backward to the weights and (but for the first layer) to the inputs, of one sample.
# A convolution counts all of its taps, also those that meet only padding.
MFLOP = {"cnn": 101.0, "mlp": 0.88, "resnet": 217.0, "lenet": 80.6, "vgg": 916.0, "lstm": 377.0, "gpt": 350.0}


# Environments and runs -----------------------------------------------------------------------------------------------


def environment(name: str) -> str:
    """The Python of a framework's own environment in the cache folder, made when it is first needed."""
    if name not in PACKAGES:
        return sys.executable
    folder = user_cache_path("fedflat") / "benchmarks" / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"{name}: installing {' '.join(PACKAGES[name])}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)
        ready.touch()
    return str(python)


def write_spec(folder: str, name: str, rounds: int, options: argparse.Namespace) -> Path:
    command = [sys.executable, SCRIPTS / "jobs.py", folder, "--jobs", name, "--rounds", rounds]
    command += ["--workers", options.workers, "--seed", options.seed]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return Path(done.stdout.strip())


def compete(name: str, python: str, spec: Path, patience: float) -> Run | None:
    """One run of one contender: its line of JSON, or None with its last words shown. It has `patience` seconds."""
    # A framework must have all cores, and decide itself how many threads it takes.
    surroundings = {key: value for key, value in os.environ.items() if key not in THREADS}
    script, options = (name, []) if name in CONTENDERS else ("ours", [VARIANTS[name]])
    command = [python, SCRIPTS / f"{script}.py", spec, *options]
    others = descendants()
    # Files in place of pipes: who outlives the contender would hold those open.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        tempfile.TemporaryFile("w+", errors="replace") as wrong,
    ):
        streams: dict[str, Any] = {"stdout": said, "stderr": wrong, "env": surroundings, "preexec_fn": first_to_end}
        try:
            code = subprocess.run(command, timeout=patience, **streams).returncode
            end = f"ended with {code}"
        except subprocess.TimeoutExpired:
            code, end = None, f"no end within {patience:.0f} s"
        finally:
            end_family(spared=others)  # also processes that outlive the one that was started
        said.seek(0)
        wrong.seek(0)
        lines = [line for line in said if line.startswith('{"contender"')]
        if code != 0 or not lines:
            print(f"{name} failed: {end}\n{wrong.read()[-2000:]}", file=sys.stderr, flush=True)
            return None
    return {**json.loads(lines[-1]), "job": spec.stem, "contender": name}


def agree(folder: str, models: Iterable[str], pythons: Mapping[str, str], options: argparse.Namespace) -> str:
    """One round of a small job with each model by every contender: how far the losses are apart, or the end."""
    lines = []
    for name in (CHECKS[model] for model in dict.fromkeys(models)):
        spec = write_spec(folder, name, 2, options)
        field = [c for c in FIELDS.get(name, CONTENDERS) if c in pythons]
        found = {c: compete(c, pythons[c], spec, options.timeout) for c in field if c in CONTENDERS}
        losses = {c: run["loss_after_first_round"] for c, run in found.items() if run}
        apart = max(losses.values()) / min(losses.values()) - 1
        lines.append(f"{name}: {len(losses)} contenders, losses after one round within {apart:.0e} of each other")
        if len(losses) < len(found) or apart > AGREEMENT:
            sys.exit(f"the contenders do not train the same thing: {losses}")
    return "; ".join(lines)


# The limit -----------------------------------------------------------------------------------------------------------


def gemm_peak(workers: int, size: int = 1024, seconds: float = 1.0) -> float:
    """GFLOP/s of fp32 matrix products in that many processes of one thread at the same time, by the faster library."""
    context = multiprocessing.get_context("spawn")
    together, rates = context.Barrier(workers), context.SimpleQueue()
    processes = [context.Process(target=_multiply, args=(together, rates, size, seconds)) for _ in range(workers)]
    for process in processes:
        process.start()
    total = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def _multiply(together: Any, rates: Any, size: int, seconds: float) -> None:
    import torch  # not in the driver: it would take its part of the libraries from the contenders' memory

    torch.set_num_threads(1)
    a, b = torch.rand(size, size), torch.rand(size, size)
    # MKL, and oneDNN, which uses the wide vectors of processors other than Intel's.
    ways = [lambda: torch.mm(a, b), lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")]
    found = []
    for multiply in ways:
        multiply()
        together.wait()
        begun, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begun) < seconds:
            multiply()
            count += 1
        found.append(2e-9 * size**3 * count / elapsed)
    rates.put(max(found))


# Statistics ----------------------------------------------------------------------------------------------------------


def speed(run: Run) -> float:
    """Samples/s: the median over the rounds after the first."""
    return median(n / s for n, s in list(zip(run["samples"], run["seconds"], strict=True))[1:])


def thrift(run: Run) -> float:
    """Samples per second of processor time, of all processes, over the rounds after the first."""
    return float(sum(run["samples"][1:]) / run["cpu_seconds"])


def ratios(ours: Sequence[Run], peer: Sequence[Run]) -> list[float]:
    """Ours ÷ peer, of the runs of the same turn."""
    turns = {run["turn"]: speed(run) for run in peer}
    return sorted(speed(run) / turns[run["turn"]] for run in ours if run["turn"] in turns)


def overhead(run: Run, cohort: int) -> float:
    """Milliseconds a client: the round's time beyond its local steps divided among the workers; the median round's."""
    rounds = list(zip(run["seconds"], run["local_seconds"], strict=True))[1:]
    return median(1000 * (seconds / cohort - local / run["workers"]) for seconds, local in rounds)


def page(runs: Sequence[Run], peaks: Sequence[float], jobs: Mapping[str, Any], settings: str) -> str:
    peak = median(peaks)
    head = f"{settings} fp32 GEMM of all workers together: {peak:.0f} GFLOP/s ({min(peaks):.0f}–{max(peaks):.0f}).\n"
    tables = (_table(job, [run for run in runs if run["job"] == name], peak) for name, job in jobs.items())
    return "\n".join([head, *tables])


def _table(job: Mapping[str, Any], runs: Sequence[Run], peak: float) -> str:
    by_name = {name: [run for run in runs if run["contender"] == name] for name in (*CONTENDERS, *VARIANTS)}
    rows = [_row(name, mine, by_name["ours"], MFLOP[job["model"]], peak) for name, mine in by_name.items() if mine]
    titles = (
        "contender",
        "samples/s",
        "ours ÷ it",
        "samples per CPU second",
        "first round done, s",
        "PSS, MB",
        "of GEMM peak",
        "loss after round 1",
    )
    return "\n".join(
        [f"### {job['name']}, data: {job['images']}\n", _line(titles), _line(["---"] * len(titles)), *rows, ""]
    ) + _spare(by_name["ours"], len(job["cohorts"][0]))


def _spare(ours: Sequence[Run], cohort: int) -> str:
    if not ours:
        return ""
    spent = sorted(overhead(run, cohort) for run in ours)
    return (
        f"\nOur overhead beyond the local steps: {median(spent):.2f} ms per client ({spent[0]:.2f}–{spent[-1]:.2f}).\n"
    )


def _row(name: str, mine: Sequence[Run], ours: Sequence[Run], mflop: float, peak: float) -> str:
    rate, versus = median(map(speed, mine)), ratios(ours, mine) if name != "ours" else []
    return _line(
        [
            _label(name, mine[0]["versions"]),
            f"{rate:,.0f}",
            f"{median(versus):.2f} ({versus[0]:.2f}–{versus[-1]:.2f})" if versus else "",
            f"{median(map(thrift, mine)):,.0f}",
            f"{median(run['first_round'] for run in mine):.1f}",
            f"{median(run['pss_mb'] for run in mine):,.0f}",
            f"{rate * mflop / (1000 * peak):.0%}",
            f"{median(losses):.5f}" if (losses := [x for r in mine if (x := r["loss_after_first_round"])]) else "",
        ]
    )


def _label(name: str, versions: Mapping[str, str]) -> str:
    own = [f"{package} {number}" for package, number in versions.items() if package not in ("python", "torch", "numpy")]
    return f"{name} ({', '.join(own)})" if own else name


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(runs: Sequence[Run], jobs: Mapping[str, Any], path: Path) -> None:
    """Samples/s of every contender, job by job, each as a share of ours."""
    from matplotlib.figure import Figure

    columns = min(len(jobs), 5)
    rows = -(-len(jobs) // columns)
    figure = Figure(figsize=(2.6 * columns + 1, 3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, name in zip_longest(panels, jobs):
        if name is None:
            axes.remove()
            continue
        here = [run for run in runs if run["job"] == name]
        speeds = {c: [speed(run) for run in here if run["contender"] == c] for c in (*CONTENDERS, *VARIANTS)}
        shown = {contender: values for contender, values in speeds.items() if values}
        colours = ["#0072b2" if contender.startswith("ours") else "#999999" for contender in shown]
        middles = [median(values) for values in shown.values()]
        axes.barh(list(shown), middles, color=colours)
        for row, values in enumerate(shown.values()):
            axes.plot([min(values), max(values)], [row, row], color="black", linewidth=1)
        axes.invert_yaxis()
        axes.set_title(name)
        axes.set_xlabel("samples/s")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# The command ---------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = ["J1=3", "J2=3", "J3=100", "J3b=20", "J4=3", "J6=3", "J7=3", "J8=3", "J9=3", "J10=4"]
    parser.add_argument("--jobs", nargs="+", default=jobs, metavar="NAME=ROUNDS", help="the first round does not count")
    parser.add_argument("--contenders", nargs="+", choices=(*CONTENDERS, *VARIANTS), default=(*CONTENDERS, *VARIANTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes of ours, actors of Flower")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run has failed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH", help="a contender's interpreter")
    parser.add_argument("--out", type=Path, default=Path("engine.md"))
    options = parser.parse_args()
    options.jobs = {name: int(rounds or 3) for name, _, rounds in (job.partition("=") for job in options.jobs)}
    if min(options.jobs.values()) < 2:
        parser.error("--jobs: at least 2 rounds, because the first one only warms up")
    given = dict(entry.partition("=")[::2] for entry in options.python)
    if unknown := given.keys() - set(CONTENDERS):
        parser.error(f"--python: there is no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    options.python = given
    return options


def _settings(options: argparse.Namespace, same: str) -> str:
    return (
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {TORCH}; "
        f"{options.repeats} turns, {options.workers} workers, medians (and ranges). {same}."
    )


def save(out: Path, runs: Sequence[Run], peaks: Sequence[float], jobs: Mapping[str, Any], settings: str) -> str:
    """Write the page and every single run."""
    text = page(runs, peaks, jobs, settings)
    out.write_text(text, "utf-8")
    out.with_suffix(".json").write_text(json.dumps({"gemm_gflops": peaks, "runs": runs}, indent=1), "utf-8")
    return text


def main() -> int:
    options = arguments()
    adopt()
    runs: list[Run] = []
    peaks: list[float] = []
    done: dict[str, Any] = {}
    text, failed = "", False
    with tempfile.TemporaryDirectory() as folder:
        pythons = {name: options.python.get(name) or environment(name) for name in options.contenders}
        specs = [write_spec(folder, name, rounds, options) for name, rounds in options.jobs.items()]
        jobs = {spec: json.loads(spec.read_text("utf-8")) for spec in specs}
        same = agree(folder, (job["model"] for job in jobs.values()), pythons, options)
        settings = _settings(options, same)
        for spec, job in jobs.items():
            done[spec.stem] = job
            for turn in range(options.repeats):
                peaks.append(gemm_peak(options.workers))
                for name, python in pythons.items():
                    if name not in FIELDS.get(spec.stem, CONTENDERS):
                        continue
                    run = compete(name, python, spec, options.timeout)
                    failed |= run is None
                    if run:
                        runs.append({**run, "turn": turn})
                        print(f"{spec.stem} {turn} {name}: {speed(run):,.0f} samples/s", flush=True)
            text = save(options.out, runs, peaks, done, settings)  # after each job, since all take hours
    draw(runs, done, options.out.with_suffix(".png"))
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
