"""Attack our own privacy: how much does a run give away of one client, at least?

    python benchmarks/dp_audit.py [--trials 4000] [--rounds 1 4]

A canary client sends the largest update it can, in one fixed direction u. With `central_dp` an attacker sees the
server's model before and after, and decides from ⟨w_T − w_0, u⟩ whether the canary took part. With `local_dp` the
attacker is the server: it sees the canary's uploads and decides from ⟨Σ Δ, u⟩ which of two opposite canaries it is. The
real client and server code trains, clips, adds noise and merges. From the attacker's error rates follows a lower bound
on ε: whatever is (ε, δ)-private has

    TPR ≤ e^ε · FPR + δ     and     1 − FPR ≤ e^ε · (1 − TPR) + δ.

The threshold is chosen on one half of the trials and judged on the other, by Clopper–Pearson bounds that hold together
with 95 % probability. The bound must stay below the ε that the accountant reports. Two broken mechanisms, whose noise
is a fifth of what is accounted for, must be found out. Prints a Markdown table; exits 1 if either fails.
"""

import argparse
import math
import sys
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from scipy.stats import beta
from torch import Tensor, nn

from fedflat import Dataset, Method, Part, Samples, federate
from fedflat.engine.inline import Inline
from fedflat.local import Outcome, Vectors
from fedflat.methods import Upload
from fedflat.methods.parts import CentralPrivacy, LocalPrivacy
from fedflat.methods.parts.protection import Privacy
from fedflat.models import Network
from fedflat.recipe import Local, Recipe, Server
from fedflat.rounds import Broadcast, Problem, Worker, conduct, first_state
from fedflat.rounds.accountant import ledger

CLIENTS, CANARY, HUGE = 8, 0, 1e3


@dataclass(frozen=True)
class Canary(Part):
    """Client 0 sends `sign` · 1000 in the first coordinate; with sign 0 it sends nothing."""

    sign: float = 1.0

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        if upload.client != CANARY:
            return upload, {}
        delta = torch.zeros_like(upload.delta)
        delta[0] = HUGE * self.sign
        return upload.update(delta=delta), {}


class FifthOfTheNoise:
    """A mistake on purpose: the noise is a fifth of what it says."""

    def drawn(self, like: Tensor, seed: int, round: int, client: int = 0) -> Tensor:
        return Privacy.drawn(self, like, seed, round, client) / 5  # type: ignore[arg-type]


@dataclass(frozen=True)
class BrokenCentral(FifthOfTheNoise, CentralPrivacy):
    """Central privacy with too little noise."""


@dataclass(frozen=True)
class BrokenLocal(FifthOfTheNoise, LocalPrivacy):
    """Local privacy with too little noise."""


def problem_with(part: Privacy, sign: float) -> Problem:
    """Eight clients with a few samples each; the first one is the canary."""
    chance = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(80, 4, generator=chance), torch.randint(0, 2, (80,), generator=chance)
    samples = Samples(inputs, labels)
    federation = federate(Dataset("audit", samples, samples, 2, (0.0,), (1.0,)), "iid", CLIENTS).to(torch.float64)
    module = nn.Sequential(nn.Linear(4, 2))
    nn.init.zeros_(module[0].weight)
    return Problem.of(federation, Network(module, torch.float64), Method(Canary(sign), part), Local(steps=1, lr=0.01))


def statistics(part: Privacy, sign: float, server: Server, rounds: int, trials: int) -> Tensor:
    """What the attacker looks at, for each trial."""
    problem, found = problem_with(part, sign), []
    if isinstance(part, LocalPrivacy):
        worker, sent = Worker(problem), {"weights": problem.network.weights.clone()}
        uploads = (worker.local_round(Broadcast(k, 0.01, sent), CANARY, None)[0] for k in range(trials * rounds))
        return torch.tensor([float(upload.delta[0]) for upload in uploads]).view(trials, rounds).sum(1)
    with closing(Inline(problem)) as engine:
        first = first_state(problem)
        chance = torch.Generator().manual_seed(int(sign) + 7)
        for trial in range(trials):
            state = replace(first, round=trial * rounds)
            for _ in range(rounds):
                share = server.cohort / CLIENTS
                cohort = [c for c in range(CLIENTS) if float(torch.rand((), generator=chance)) < share]
                state, _ = conduct(problem, state, engine, cohort, server)
            found.append(float(state.weights[0] - first.weights[0]))
    return torch.tensor(found)


def lower_bound(ins: Tensor, outs: Tensor, delta: float, confidence: float = 0.95) -> float:
    """The largest ε that the trials refute, at this confidence; 0 if they refute none."""
    half = len(ins) // 2
    candidates = torch.cat([ins[:half], outs[:half]]).quantile(torch.linspace(0.01, 0.99, 99, dtype=ins.dtype))
    best = max(
        ((threshold, flip) for threshold in candidates.tolist() for flip in (False, True)),
        key=lambda choice: _epsilon(ins[:half], outs[:half], *choice, delta, 0.5),
    )
    return max(0.0, _epsilon(ins[half:], outs[half:], *best, delta, confidence))


def _epsilon(ins: Tensor, outs: Tensor, threshold: float, flip: bool, delta: float, confidence: float) -> float:
    """log((TPR − δ)/FPR) at the pessimistic ends of both rates; `flip` swaps the two hypotheses."""
    hits, alarms = int((ins > threshold).sum()), int((outs > threshold).sum())
    if flip:
        hits, alarms = len(outs) - alarms, len(ins) - hits
    risk = (1 - confidence) / 2
    low = float(beta.ppf(risk, hits, len(ins) - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - risk, alarms + 1, len(outs) - alarms)) if alarms < len(outs) else 1.0
    return math.log((low - delta) / high) if low > delta else -math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    delta = 1e-3
    full = Server(cohort=CLIENTS, sampling="bernoulli", average="uniform")
    some = Server(cohort=CLIENTS // 2, sampling="bernoulli", average="uniform")
    cases = [
        ("central_dp(noise=1)", CentralPrivacy(1.0, 1.0, delta), (1.0, 0.0), full, True),
        ("central_dp(noise=2)", CentralPrivacy(1.0, 2.0, delta), (1.0, 0.0), full, True),
        ("central_dp(noise=1), half of the clients", CentralPrivacy(1.0, 1.0, delta), (1.0, 0.0), some, True),
        ("local_dp(noise=2)", LocalPrivacy(1.0, 2.0, delta), (1.0, -1.0), full, True),
        ("local_dp(noise=4)", LocalPrivacy(1.0, 4.0, delta), (1.0, -1.0), full, True),
        ("central_dp(noise=1) with a fifth of its noise", BrokenCentral(1.0, 1.0, delta), (1.0, 0.0), full, False),
        ("local_dp(noise=2) with a fifth of its noise", BrokenLocal(1.0, 2.0, delta), (1.0, -1.0), full, False),
    ]  # fmt: skip
    failed = False
    print(f"{options.trials} trials each, δ = {delta:g}\n")
    print("| mechanism | rounds | ε reported | ε measured, at least | |\n|---|---|---|---|---|")
    for name, part, (present, absent), server, honest in cases:
        for rounds in options.rounds:
            ins = statistics(part, present, server, rounds, options.trials)
            outs = statistics(part, absent, server, rounds, options.trials)
            book = ledger(Method(part), Recipe(server=server), CLIENTS)
            reported, measured = book.epsilon(rounds), lower_bound(ins, outs, delta)
            held = measured <= reported
            failed |= held != honest
            verdict = "holds" if held else "refuted" if honest else "found out"
            print(f"| {name} | {rounds} | {reported:.2f} | {measured:.2f} | {verdict} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
