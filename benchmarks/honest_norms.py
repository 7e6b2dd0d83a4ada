"""How long honest updates are beside the running median, which `deployment.outlier` limits.

    python benchmarks/honest_norms.py [--setting "digits α=0.1" …] [--method scaffold …] [--rounds 0]

Methods of the catalogue on several data sets and splits, with admission's limits off. Of each upload

    rᵢ = ‖Δᵢ‖ / (running median · max(1, Kᵢ/K̄)),

as admission computes it: a deployment refuses an upload if rᵢ is above `deployment.outlier`, and for a vector beside Δ
(control variates, duals, momenta), with its own running median, above its square. By default the steps Kᵢ of a client
with more samples than the median are those of the median (`admission.max_share`); where counts are trusted they are its
own. Prints a Markdown table of the largest rᵢ, the round and client it is from, and how many uploads are above 3, 5, 10
and 25; then the largest and those above 5 if counts are trusted. Runs whose norms grow a thousandfold diverge: their
rows say so, and they are not in the sum at the end.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from fedflat.engine import Inline
from fedflat.errors import FedflatError
from fedflat.methods import CATALOGUE, Upload
from fedflat.recipe import Admission, load
from fedflat.rounds import Broadcast, Problem, Refusal, conduct, counted_samples, draw_cohort, first_state
from fedflat.rounds.client import local_rule
from fedflat.rounds.medians import FALL, WINDOW
from fedflat.runs.build import prepare

ABOVE = (3, 5, 10, 25)
DIVERGED = 1000.0  # largest median of a round ÷ that of the first
SMALL = "model={name='mlp', hidden=[32]}"
MOMENTUM = {"scaffold": "scaffold(momentum_aware=True)", "fedcm": "fedcm(momentum_aware=True)"}  # where β is not 0
SETTINGS: dict[str, tuple[str | None, list[str]]] = {
    "digits α=0.1": (None, ["server.rounds=40"]),
    "digits α=0.1, 4 of 100": (None, ["split.clients=100", "server.cohort=4", "server.rounds=60"]),
    "digits α=0.1, 1 of 20": (None, ["server.cohort=1", "server.rounds=60"]),
    "digits sizes": (None, ["split={name='sizes', exponent=1.5, clients=30}", "server.cohort=10", "server.rounds=30"]),
    "digits shards": (None, ["split={name='shards', shards=2, clients=30}", "server.cohort=10", "server.rounds=30"]),
    "digits iid": (None, ["split={name='iid', clients=20}", "server.rounds=20"]),
    "fashion, man": ("man", ["data={name='fashion-mnist', limit=4000}", SMALL, "server.rounds=20"]),
    "mnist, sol": ("sol", ["data={name='mnist', limit=10000}", "split.clients=40", SMALL, "server.cohort=10",
                           "server.rounds=20"]),
    "mnist, smoo": ("smoo", ["data={name='mnist', limit=4000}", SMALL, "server.rounds=20"]),
    "cifar10, sol": ("sol", ["data.limit=5000", "split.clients=20", "server.cohort=5", "server.rounds=8"]),
    "shakespeare": (None, ["data={name='shakespeare', limit=20000, shortest=1000, predict='all', window=40}",
                           "split={name='natural', clients=0}", "model={name='gpt', width=32, depth=1}",
                           "local.lr=0.1", "server.cohort=10", "server.rounds=10"]),
}  # fmt: skip


class Norms(NamedTuple):
    """The norms of one upload, by the names of its vectors, and its steps in units of the mean client's.

    `counted` are its steps as admission counts them if samples are only claimed.
    """

    round: int
    client: int
    steps: float
    counted: float
    norms: dict[str, float]


class Noting(Inline):
    """An engine that notes the norms of all uploads."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem, self.noted = problem, list[Norms]()
        sizes = {client: problem.federation.samples(client) for client in range(problem.federation.clients)}
        self.most = max(counted_samples(sizes, Admission()).values())

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        mean = local_rule(self.problem, broadcast, -1, 1).typical_steps
        for each in super().local_rounds(broadcast, cohort):
            if isinstance(each, Upload):
                beside = {name: norm for name, norm in each.norms.items() if name not in self.problem.method.figures}
                steps, counted = each.steps / mean, min(1.0, self.most / each.samples)
                named = {"Δ": each.norm, **beside}
                self.noted.append(Norms(broadcast.round, each.client, steps, steps * counted, named))
            yield each


def norms(preset: str | None, changes: Sequence[str], method: str, rounds: int) -> list[Norms]:
    """The norms of all uploads of an honest run whose limits are off."""
    longer = [f"server.rounds={rounds}"] if rounds else []
    method = MOMENTUM.get(method, method) if preset == "sol" else method
    off = [f"method={method}", "admission.outlier=0", "evaluation.every=0"]
    problem = prepare(load(preset, [*changes, *longer, *off]))
    state, recipe = first_state(problem), problem.recipe
    with closing(Noting(problem)) as engine:
        for round in range(recipe.server.rounds):
            cohort = draw_cohort(recipe.server, problem.federation.clients, recipe.seed, round)
            state, _ = conduct(problem, state, engine, cohort)
        return engine.noted


def cohorts(noted: Sequence[Norms]) -> list[list[Norms]]:
    by_round = defaultdict[int, list[Norms]](list)
    for each in noted:
        by_round[each.round].append(each)
    return [cohort for _, cohort in sorted(by_round.items())]


def ratios(noted: Sequence[Norms], name: str, trusted: bool) -> Iterator[tuple[float, Norms]]:
    """rᵢ of every upload that a deployment's admission compares."""
    window = deque[float](maxlen=WINDOW)
    for cohort in cohorts(noted):
        here, scale = statistics.median(each.norms[name] for each in cohort), 0.0
        if window:
            scale = statistics.median(window)
        running, scale = scale, max(scale, here if len(cohort) > 2 else 0.0)
        if scale > 0:
            for each in cohort:
                steps = each.steps if trusted else each.counted
                yield each.norms[name] / (scale * max(1.0, steps)), each
        if math.isfinite(here) and here > 0:
            window.append(max(here, FALL * running))


def diverged(noted: Sequence[Norms]) -> bool:
    medians = [statistics.median(each.norms["Δ"] for each in cohort) for cohort in cohorts(noted)]
    return not max(medians) <= DIVERGED * medians[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--method", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=0, help="in place of the setting's own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    above = " | ".join(f"> {limit}" for limit in ABOVE)
    print(f"| setting | method | vector | uploads | largest | round, client | {above} | trusted: largest | > 5 |")
    print(f"|{'---|' * (8 + len(ABOVE))}", flush=True)
    every = defaultdict[tuple[str, bool], list[float]](list)
    for setting in options.setting:
        for method in options.method or [*CATALOGUE]:
            try:
                noted = norms(*SETTINGS[setting], method, options.rounds)
            except FedflatError as error:
                print(f"{setting}, {method}: {error}", file=sys.stderr, flush=True)
                continue
            for name in noted[0].norms:
                _row(f"| {setting} | {method} | {name} |", noted, name, every)
    for (kind, trusted), found in every.items():
        counts = ", ".join(f"{sum(ratio > limit for ratio in found)} above {limit}" for limit in ABOVE)
        how = "trusted" if trusted else "claimed"
        print(f"\n{kind}, samples {how}: {len(found):,}, largest {max(found, default=math.nan):.2f}, {counts}")
    return 0


def _row(head: str, noted: Sequence[Norms], name: str, every: dict[tuple[str, bool], list[float]]) -> None:
    """Print a row of the table, and add its ratios to those of all rows."""
    claimed, trusted = (
        [pair for pair in ratios(noted, name, known) if math.isfinite(pair[0])] for known in (False, True)
    )
    most, at = max(claimed, key=lambda pair: pair[0], default=(math.nan, noted[0]))
    above = " | ".join(str(sum(ratio > limit for ratio, _ in claimed)) for limit in ABOVE)
    place = "diverges" if diverged(noted) else f"{at.round + 1}, {at.client}"
    known = f"{max((ratio for ratio, _ in trusted), default=math.nan):.2f} | {sum(ratio > 5 for ratio, _ in trusted)}"
    print(f"{head} {len(claimed)} | {most:.2f} | {place} | {above} | {known} |", flush=True)
    if not diverged(noted):
        kind = "Δ" if name == "Δ" else "vectors beside Δ"
        every[kind, False] += [ratio for ratio, _ in claimed]
        every[kind, True] += [ratio for ratio, _ in trusted]


if __name__ == "__main__":
    sys.exit(main())
