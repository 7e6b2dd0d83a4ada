"""Attacks × defences × methods on the digits: what each robust average stands, and what it costs without an attack.

    python benchmarks/attacks.py [--rounds 16] [--method fedavg …] [--defence default …] [--attack hello …] [--share 1]

Twenty clients of the digits, split by Dirichlet(0.5), ten of them a round. Four of the twenty lie, so that two of a
cohort do on average. "With absentees" a third of each cohort does not reply. A liar does its honest local round first
and then changes what it sends up, Δ and all vectors beside it:

    sign      −x                                     ×10, ×100   −10 x, −100 x
    alie      mean − z · deviation of the honest     ipm         −2 · mean of the honest (inner product manipulation)
    label     trained on labels 9 − y                samples     −x, with a claim of 10⁹ samples in the upload
    hello     −x, with that claim in the hello too, so that the liar counts for `admission.max_share` median clients
    beside    an honest Δ, and −1000 x for every vector beside it (none with FedAvg)

The liars know what the honest clients of the round send. `nothing` is the plain average with all limits of admission
off, `default` the plain average with the recipe's limits, and the others have those limits too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace

import torch
from torch import Tensor

from fedflat import Dataset, Federation, Samples, federate
from fedflat.engine import Inline
from fedflat.methods import ServerView, Upload, collect, parse
from fedflat.models import Network, build
from fedflat.recipe import Admission, Evaluation, Local, Server
from fedflat.rounds import Broadcast, Problem, Refusal, conduct, draw_cohort, first_state

CLIENTS, COHORT, LIARS, LABELS = 20, 10, frozenset(range(4)), 10
Z = 1.5  # deviations of ALIE: the largest with which two of ten hide among the others
METHODS = ("fedavg", "scaffold", "fedsmoo")
DEFENCES = {
    "nothing": "", "default": "", "norm_bound": "norm_bound", "trimmed_mean(0.2)": "trimmed_mean(0.2)",
    "median": "median", "geometric_median": "geometric_median", "centred_clipping": "centred_clipping",
    "krum": "krum", "multi_krum": "multi_krum", "bucketing(geometric)": "bucketing('geometric_median')",
    "bucketing(median)": "bucketing('median')",
}  # fmt: skip
ATTACKS = ("none", "sign", "×10", "×100", "alie", "ipm", "label", "samples", "hello", "beside")
CLAIM = 10**9  # samples


class Boasting(Federation):
    """A federation whose liars said in their hello that they have very many samples."""

    def samples(self, client: int) -> int:
        return CLAIM if client in LIARS else super().samples(client)


class Attacked(Inline):
    """An engine some of whose clients lie, and some of whom do not reply."""

    def __init__(self, problem: Problem, attack: str, absent: bool) -> None:
        super().__init__(problem)
        self.attack, self.absent = attack, absent

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        chance = torch.Generator().manual_seed(broadcast.round)
        uploads = [each for each in super().local_rounds(broadcast, cohort) if isinstance(each, Upload)]
        honest = [upload for upload in uploads if upload.client not in LIARS]
        for upload in uploads:
            if self.absent and float(torch.rand((), generator=chance)) < 1 / 3:
                yield Refusal(upload.client, "absent", "it did not reply")
            elif upload.client in LIARS and self.attack not in ("none", "label"):
                yield lied(upload, self.attack, honest)
            else:
                yield upload


def lied(upload: Upload, attack: str, honest: Sequence[Upload]) -> Upload:
    """The upload that a liar sends in place of its own."""

    def instead(name: str) -> Tensor:
        own = upload[name]
        if attack == "beside":
            return own if name == "delta" else -1000 * own
        if attack in ("sign", "samples", "hello"):
            return -own
        if attack.startswith("×"):
            return -int(attack[1:]) * own
        crowd = torch.stack([each[name] for each in honest])
        return crowd.mean(dim=0) - Z * crowd.std(dim=0) if attack == "alie" else -2 * crowd.mean(dim=0)

    vectors = {name: instead(name) for name in upload.vectors}
    samples = CLAIM if attack in ("samples", "hello") else upload.samples
    return replace(upload, delta=instead("delta"), vectors=vectors, samples=samples)


def poisoned(federation: Federation) -> Federation:
    """The federation whose liars have turned their labels around."""
    train = federation.dataset.train
    labels = train.labels.clone()
    for client in LIARS:
        labels[federation.shards[client]] = LABELS - 1 - labels[federation.shards[client]]
    dataset = replace(federation.dataset, train=Samples(train.inputs, labels))
    assert isinstance(dataset, Dataset)
    return replace(federation, dataset=dataset)


def accuracy(
    federation: Federation, method: str, defence: str, attack: str, absent: bool, rounds: int, share: float | None
) -> float:
    """The accuracy after the rounds; `share` replaces `admission.max_share`."""
    written = f"{method} + {DEFENCES[defence]}".removesuffix(" + ")
    data = poisoned(federation) if attack == "label" else federation
    if attack == "hello":
        data = Boasting(**{field.name: getattr(federation, field.name) for field in fields(federation)})
    module = build("mlp", federation.dataset.shape, LABELS, torch.Generator().manual_seed(0), hidden=[32])
    local = Local(steps=5, batch=0, lr=0.3)
    problem = Problem.of(data, Network(module), parse(written), local, group=COHORT, deployed=defence != "nothing")
    limits = Admission(outlier=0.0) if defence == "nothing" else Admission()
    limits = limits if share is None else limits.model_copy(update={"max_share": share})
    server = Server(rounds=rounds, cohort=COHORT, average="samples")
    state = first_state(problem)
    with closing(Attacked(problem, attack, absent)) as engine:
        for round in range(rounds):
            cohort = draw_cohort(server, CLIENTS, 0, round)
            state, _ = conduct(problem, state, engine, cohort, server, Evaluation(), limits)
        return engine.score(state, "test", 500).values["accuracy"]


def milliseconds(defence: str, size: int = 1_000_000) -> float:
    """What the server computes for the average of ten vectors of a million entries."""
    chance = torch.Generator().manual_seed(0)
    rows = [torch.randn(size, generator=chance) for _ in range(COHORT)]
    method, zero = parse(DEFENCES[defence] or "fedavg"), torch.zeros(size)
    view = ServerView(zero, zero, 0, CLIENTS, method.first_state(zero))
    begun = time.process_time()
    uploads = collect([Upload(i, 1, 1, 0.1, 0.0, row) for i, row in enumerate(rows)], "uniform")
    method.merge(uploads.average("delta"), view, uploads)
    return 1e3 * (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description="attacks × defences × methods on the digits")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--defence", nargs="+", choices=DEFENCES, default=[*DEFENCES])
    parser.add_argument("--attack", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--share", type=float, help="admission.max_share in place of its default")
    parser.add_argument("--exponent", type=float, help="clients' sizes by a power law instead of Dirichlet(0.5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    federation = federate("digits", clients=CLIENTS, alpha=0.5)
    if options.exponent:
        federation = federate("digits", "sizes", clients=CLIENTS, exponent=options.exponent)
    for method in options.method:
        print(f"\n{method}: accuracy in per cent, without / with absentees\n")
        print(f"| defence | {' | '.join(options.attack)} |\n|---|{'---|' * len(options.attack)}")
        for defence in options.defence:
            cells = [_cell(federation, method, defence, attack, options) for attack in options.attack]
            print(f"| {defence} | {' | '.join(cells)} |", flush=True)
    if len(options.method) == len(METHODS):
        print("\n| defence | ms for ten vectors of 10⁶ |\n|---|---|")
        for defence in options.defence:
            print(f"| {defence} | {milliseconds(defence):.0f} |", flush=True)


def _cell(federation: Federation, method: str, defence: str, attack: str, options: argparse.Namespace) -> str:
    """The accuracies without and with absentees, in per cent."""
    both = (
        accuracy(federation, method, defence, attack, absent, options.rounds, options.share) for absent in (False, True)
    )
    return " / ".join(f"{100 * each:.0f}" for each in both)


if __name__ == "__main__":
    main()
