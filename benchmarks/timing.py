"""Ratios of times, measured in turns because machines are noisy (A, B, C, A, B, C, …), and where time goes."""

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    jobs: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """The seconds of each job in each of the repeats, after one unmeasured turn of all."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            begun = clock()
            job()
            if repeat:
                seconds[name].append(clock() - begun)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> tuple[float, float, float]:
    """The median of the ratios of neighbouring measurements, with their quartiles."""
    ratios = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def milliseconds(function: Callable[[], object], calls: int = 1, turns: int = 15) -> list[float]:
    """CPU time of a call, in ascending order over the turns."""
    function()
    taken = []
    for _ in range(turns):
        begun = time.process_time()
        for _ in range(calls):
            function()
        taken.append(1000 * (time.process_time() - begun) / calls)
    return sorted(taken)


def operators(job: Callable[[], object], calls: int = 10, most: int = 8) -> list[tuple[str, float]]:
    """The operators of torch with the largest shares of the CPU time of some calls, with these shares."""
    from torch.profiler import profile

    job()
    with profile() as seen:
        for _ in range(calls):
            job()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [(event.key, event.self_cpu_time_total / total) for event in events[:most]]


def shares(job: Callable[[], object]) -> str:
    """These operators as text."""
    return ", ".join(f"{name} {share:.0%}" for name, share in operators(job))
