"""Attack our own privacy: how much does a run give away of one client, at least?

    python benchmarks/dp_audit.py [--trials 40000] [--rounds 1 5] [--whole 1500]
    python benchmarks/dp_audit.py --power 200       # how often such an audit finds half of the noise, in simulation

A canary client sends the largest update it can, in one fixed direction u. With `central_dp` an attacker sees the
server's move and decides from ⟨Σ moves, u⟩ whether the canary took part. With `local_dp` the attacker is the server: it
sees the canary's uploads and decides from ⟨Σ Δ, u⟩ which of two opposite canaries it is. From the attacker's error
rates follows a lower bound on ε: whatever is (ε, δ)-private has

    TPR ≤ e^ε · FPR + δ     and     1 − FPR ≤ e^ε · (1 − TPR) + δ.

The threshold is chosen on a quarter of the trials and judged on the others, by Clopper–Pearson bounds that hold
together with 95 % probability. Thresholds that only a few trials exceed are left out: the best of many such rates is
chance. n trials can show at most ε ≈ log(n/5), so that mechanisms are chosen whose ε is well below: only then can the
audit fail. A trial calls the part itself, which clips and draws its noise from the system, as in a deployment. So that
this stands for a run, `--whole` rounds of real clients, engine and server are compared with as many trials (two-sample
Kolmogorov–Smirnov). The bound must stay below the ε that the accountant reports, and every broken mechanism must be
found out. Prints a Markdown table; exits 1 if any of this fails.
"""

import argparse
import math
import sys
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from scipy.stats import beta, ks_2samp
from torch import Tensor, nn

from fedflat import Dataset, Method, Part, Samples, federate
from fedflat.engine.inline import Inline
from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.methods import ServerView, Upload, collect
from fedflat.methods.parts import CentralPrivacy, LocalPrivacy
from fedflat.methods.parts.protection import Privacy
from fedflat.models import Network
from fedflat.recipe import Local, Recipe, Server
from fedflat.rounds import Broadcast, Problem, Worker, conduct, first_state
from fedflat.rounds.accountant import ledger

CLIENTS, CANARY, HUGE, DELTA = 8, 0, 1e3, 1e-3
SIZE = 4  # entries of an update; the attack looks at the first


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


class Forgotten:
    """A mistake on purpose: no noise at all."""

    def drawn(self, like: Tensor, seed: int, round: int, client: int = 0) -> Tensor:
        return torch.zeros_like(like)


class Halved:
    """A mistake on purpose: half of the noise."""

    def drawn(self, like: Tensor, seed: int, round: int, client: int = 0) -> Tensor:
        return Privacy.drawn(self, like, seed, round, client) / 2  # type: ignore[arg-type]


class Unscaled:
    """A mistake on purpose: noise of z instead of z C."""

    def drawn(self, like: Tensor, seed: int, round: int, client: int = 0) -> Tensor:
        return Privacy.drawn(self, like, seed, round, client) / self.clip  # type: ignore[attr-defined]


class Unclipped:
    """A mistake on purpose: an update keeps its norm."""

    def clipped(self, delta: Tensor) -> Tensor:
        return delta


MISTAKES = {"no noise": Forgotten, "half the noise": Halved, "noise not scaled by C": Unscaled, "no clip": Unclipped}


def broken(part: Privacy, mistake: type) -> Privacy:
    """The part with a mistake in it."""
    kind = dataclass(frozen=True)(type(mistake.__name__, (mistake, type(part)), {}))
    made: Privacy = kind(part.clip, part.noise, part.delta, part.entropy)
    return made


def problem_with(part: Privacy, sign: float) -> Problem:
    """Eight clients with a few samples each; the first one is the canary."""
    chance = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(80, 4, generator=chance), torch.randint(0, 2, (80,), generator=chance)
    samples = Samples(inputs, labels)
    federation = federate(Dataset("audit", samples, samples, 2, (0.0,), (1.0,)), "iid", CLIENTS).to(torch.float64)
    module = nn.Sequential(nn.Linear(4, 2))
    nn.init.zeros_(module[0].weight)
    return Problem.of(federation, Network(module, torch.float64), Method(Canary(sign), part), Local(steps=1, lr=0.01))


def of_runs(part: Privacy, sign: float, server: Server, trials: int) -> Tensor:
    """What the attacker looks at after a round of real clients, engine and server."""
    problem, found = problem_with(part, sign), []
    if isinstance(part, LocalPrivacy):
        worker, sent = Worker(problem), {"weights": problem.network.weights.clone()}
        uploads = (worker.local_round(Broadcast(k, 0.01, sent), CANARY, None)[0] for k in range(trials))
        return torch.tensor([float(upload.delta[0]) for upload in uploads])
    with closing(Inline(problem)) as engine:
        first = first_state(problem)
        for trial in range(trials):
            state, _ = conduct(problem, replace(first, round=trial), engine, range(CLIENTS), server)
            found.append(float(state.weights[0] - first.weights[0]))
    return torch.tensor(found)


def of_part(part: Privacy, sign: float, odds: float, rounds: int, trials: int) -> Tensor:
    """What the attacker looks at, where the part is called alone: the sum of what it releases over the rounds."""
    zero = torch.zeros(SIZE, dtype=torch.float64)
    canary = zero.clone()
    canary[0] = HUGE * sign
    other = Upload(1, 10, 1, 0.01, 0.0, torch.full_like(zero, 0.1))
    absent, present = (
        collect(each, "uniform") for each in ([other], [Upload(CANARY, 10, 1, 0.01, 0.0, canary), other])
    )
    total, chance = torch.zeros(trials, dtype=torch.float64), torch.Generator().manual_seed(int(sign) + 7)
    for at in range(trials):
        for round in range(rounds):
            if isinstance(part, LocalPrivacy):
                outcome = Outcome(canary, 0.0, LocalRule(0.01, 1, round=round, client=CANARY), {}, {})
                upload, _ = part.report(Upload(CANARY, 10, 1, 0.01, 0.0, canary), {}, {}, outcome)
                total[at] += upload.delta[0]
            else:
                here = odds == 1 or float(torch.rand((), generator=chance)) < odds
                server = ServerView(zero, zero, round, CLIENTS, {}, cohort=odds * CLIENTS)
                total[at] += part.merge(zero, server, present if here else absent)[0][0]
    return total


def lower_bound(ins: Tensor, outs: Tensor, delta: float, confidence: float = 0.95) -> float:
    """The largest ε that the trials refute, at this confidence; 0 if they refute none."""
    few = len(ins) // 4
    candidates = torch.cat([ins[:few], outs[:few]]).quantile(torch.linspace(0.02, 0.98, 49, dtype=ins.dtype))
    best = max(
        ((threshold, flip) for threshold in candidates.tolist() for flip in (False, True)),
        key=lambda choice: _epsilon(ins[:few], outs[:few], *choice, delta, confidence),
    )
    return max(0.0, _epsilon(ins[few:], outs[few:], *best, delta, confidence))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--whole", type=int, default=1500, help="rounds of real clients and servers")
    parser.add_argument("--power", type=int, default=0, help="simulate so many audits instead")
    options = parser.parse_args()
    if options.power:
        return _power(options.power, options.trials)
    central, local = CentralPrivacy(5.0, 4.0, DELTA, "system"), LocalPrivacy(5.0, 8.0, DELTA, "system")
    parts = [("central_dp(clip=5, noise=4)", central, 1.0), ("central_dp, half of the clients", central, 0.5),
             ("local_dp(clip=5, noise=8)", local, 1.0)]  # fmt: skip
    good = _same_as_runs(central, options.whole) & _same_as_runs(local, options.whole)
    print(f"\n{options.trials:,} trials of each kind, δ = {DELTA:g}\n")
    print("| mechanism | rounds | ε reported | ε measured, at least | |\n|---|---|---|---|---|")
    for name, part, odds in parts:
        for rounds in options.rounds:
            good &= _judged(name, part, part, odds, rounds, options.trials // rounds)
        for mistake, how in MISTAKES.items():
            good &= _judged(f"{name}, {mistake}", part, broken(part, how), odds, 1, options.trials)
    sys.exit(not good)


def _power(audits: int, trials: int) -> None:
    """Print how often an audit of this size finds half of the noise, and how often it refutes the right noise.

    The attacker's number is a standard normal one, shifted by 1/z if the canary takes part.
    """
    chance = torch.Generator().manual_seed(0)
    print("| mechanism | ε reported | ε measured, at least: smallest, mean, largest | above the reported one |")
    print("|---|---|---|---|")
    for odds in (1.0, 0.5):
        book = ledger(Method(CentralPrivacy(5.0, 4.0, DELTA, "system")), Recipe(server=_server(odds)), CLIENTS)
        assert book is not None
        reported = book.epsilon(1) or math.nan
        for name, noise in (("right", 4.0), ("half the noise", 2.0)):
            found = []
            for _ in range(audits):
                here = torch.rand(trials, generator=chance, dtype=torch.float64) < odds
                ins, outs = (torch.randn(trials, generator=chance, dtype=torch.float64) for _ in range(2))
                found.append(lower_bound(ins + here / noise, outs, DELTA))
            span = f"{min(found):.2f}, {sum(found) / audits:.2f}, {max(found):.2f}"
            above = sum(each > reported for each in found)
            print(f"| {name}, {odds:.0%} of the clients | {reported:.2f} | {span} | {above} of {audits} |", flush=True)


def _judged(name: str, part: Privacy, used: Privacy, odds: float, rounds: int, trials: int) -> bool:
    """Attack the part that is used, and compare with the ε of the part that it should be."""
    signs = (1.0, -1.0) if isinstance(part, LocalPrivacy) else (1.0, 0.0)
    ins, outs = (of_part(used, sign, odds, rounds, trials) for sign in signs)
    book = ledger(Method(part), Recipe(server=_server(odds)), CLIENTS)
    assert book is not None
    reported, measured = book.epsilon(rounds) or math.nan, lower_bound(ins, outs, DELTA)
    held, honest = measured <= reported, part is used
    verdict = "holds" if held and honest else "NOT found out" if held else "REFUTED" if honest else "found out"
    print(f"| {name} | {rounds} | {reported:.2f} | {measured:.2f} | {verdict} |", flush=True)
    return held == honest


def _server(odds: float) -> Server:
    return Server(cohort=int(odds * CLIENTS), sampling="bernoulli", average="uniform")


def _same_as_runs(part: Privacy, trials: int) -> bool:
    """Whether the part alone releases what a run releases: the same distribution, with the canary there."""
    whole = of_runs(part, 1.0, _server(1.0), trials)
    alone = of_part(part, 1.0, 1.0, 1, trials)
    drift = 0.0 if isinstance(part, LocalPrivacy) else float(whole.mean() - alone.mean())  # of the other clients
    p = float(ks_2samp((whole - drift).numpy(), alone.numpy()).pvalue)
    print(
        f"{type(part).__name__}: {trials:,} rounds of a run and {trials:,} of the part alone, p = {p:.2f}", flush=True
    )
    return p > 1e-3


if __name__ == "__main__":
    main()
