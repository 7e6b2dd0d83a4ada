"""LoRA against full fine-tuning: a small GPT trained centrally on half of Shakespeare's roles, then on the other half.

    python benchmarks/lora_study.py [--rounds 8] [--out runs/lora] [--results lora.jsonl]

The first half of the roles trains the GPT in one place. The roles of the other half are the clients of a federation
that fine-tunes it, either all of its weights or adapters of rank 8 in its attention, by FedAvg, FedSAM and FedSMOO. For
each run the script prints the accuracy of the next character on the clients' last tenth of text, the parameters
trained, the bytes in both directions, λ₁ of the Hessian in the trained and in all weights (128 windows), and seconds.
The base alone is the first row. `--results` also writes a JSON line for each.

The text is the file input.txt of the data directory's folder shakespeare, roles as in "ROLE:" before each speech.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedflat import Dataset, Federation, Samples, train
from fedflat.federation.places import data_directory
from fedflat.flatness import Hessian, Objective, top_eigenvalues
from fedflat.models import build, merged
from fedflat.tasks import TASKS

WINDOW, FEWEST = 64, 20  # characters of a sample; windows of a role that becomes a client
GPT = dict(width=64, heads=4, layers=3)
ADAPTERS = {"rank": 8, "targets": "attention"}
METHODS = ("fedavg", "fedsam(0.05)", "fedsmoo(0.05)")
RATES = {"full": 0.05, "lora": 0.1}


def roles(text: str) -> list[Tensor]:
    """The windows of every role with enough of them, in the order of the roles' names: rows of token ids."""
    known = {character: i for i, character in enumerate(sorted(set(text)))}
    speeches = defaultdict(list)
    for speech in text.split("\n\n"):
        role, colon, words = speech.partition(":\n")
        if colon and "\n" not in role:
            speeches[role].append(words)
    spoken = (torch.tensor([known[c] for c in "\n".join(speeches[role])]) for role in sorted(speeches))
    rows = (ids[: len(ids) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1) for ids in spoken)
    return [each for each in rows if len(each) >= FEWEST]


def federated(name: str, clients: list[Tensor], vocabulary: int) -> Federation:
    """A client for each role; the last tenth of its windows are test samples."""
    first = [rows[: len(rows) - len(rows) // 10] for rows in clients]
    last = torch.cat([rows[len(rows) - len(rows) // 10 :] for rows in clients])
    samples = [Samples(rows[:, :-1], rows[:, 1:]) for rows in (torch.cat(first), last)]
    dataset = Dataset(name, *samples, vocabulary, (), (), vocabulary=vocabulary, task="next-token")
    return Federation(dataset, tuple(torch.arange(len(samples[0])).split([len(rows) for rows in first])))


def sharpness(module: torch.nn.Module, federation: Federation, samples: int) -> float:
    """λ₁ of the mean loss of some training windows in the module's trained weights."""
    chosen = torch.randperm(federation.size("train"), generator=torch.Generator().manual_seed(0))[:samples]
    batches = [federation.batch(some, None) for some in chosen.split(64)]
    return float(top_eigenvalues(Hessian(Objective(module, TASKS["next-token"].loss, batches)), 1, 1e-2).values[0])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--central", type=int, default=8, help="rounds of 100 steps in one place")
    options.add_argument("--samples", type=int, default=128, help="windows of λ₁")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--methods", nargs="*", default=METHODS)
    options.add_argument("--out", type=Path, default=None)
    options.add_argument("--results", type=Path, default=None)
    given = options.parse_args()
    text = (data_directory() / "shakespeare" / "input.txt").read_text("utf-8")
    everybody, vocabulary = roles(text), len(set(text))
    there, here = (federated(name, everybody[i::2], vocabulary) for i, name in enumerate(("others", "roles")))
    module = build("gpt", (WINDOW,), vocabulary, vocabulary=vocabulary, per_token=True, **GPT)
    alone = replace(there, shards=(torch.arange(there.size("train")),))
    begun = time.perf_counter()
    central = dict(rounds=given.central, steps=100, cohort=1, batch=16, lr=2e-3, engine="inline", evaluation_every=0)
    base = train(alone, module, "fedavg + adamw", **central).model
    seconds = time.perf_counter() - begun
    print(f"{there.clients} roles in one place, {here.clients} clients; base after {seconds:.0f} s", flush=True)
    settings = dict(rounds=given.rounds, cohort=6, steps=8, batch=16, momentum=0.9, seed=0, workers=given.workers)
    settings |= dict(evaluation_every=given.rounds, measures=[])
    row = before(base, here, given.samples)
    print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}", flush=True)
    tell(row, given.results, "w")
    for kind in ("full", "lora"):
        adapters = {"model_lora": ADAPTERS} if kind == "lora" else {}
        for method in given.methods:
            out = given.out and given.out / f"{kind}-{method.partition('(')[0]}"
            result = train(here, base, method, lr=RATES[kind], out=out, **adapters, **settings)
            tell(after(kind, method, result, here, given.samples), given.results)


def before(base: torch.nn.Module, federation: Federation, samples: int) -> dict[str, Any]:
    """The base on the clients' test windows."""
    inputs, labels = federation.held_out("test", 0, federation.size("test"))
    with torch.no_grad():
        logits = base(inputs)
    right = float((logits.argmax(-1) == labels).float().mean())
    loss = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    top = sharpness(base, federation, samples)
    return record("base", "", right, loss, 0, 0.0, 0.0, top, top, 0.0)


def after(kind: str, method: str, result: Any, federation: Federation, samples: int) -> dict[str, Any]:
    """What a run has reached, and what it cost."""
    found, last = result.summary, result.history[-1]
    tops = [sharpness(module, federation, samples) for module in (result.model, merged(result.model))]
    traffic = (found["bytes_down"] / 1e6, found["bytes_up"] / 1e6)
    trained = found["parameters_trained"]
    return record(kind, method, last["accuracy"], last["loss"], trained, *traffic, *tops, found["seconds"])


def record(*values: Any) -> dict[str, Any]:
    names = ("weights", "method", "accuracy", "loss", "trained", "MB down", "MB up", "λ₁ trained", "λ₁ all", "seconds")
    return dict(zip(names, values, strict=True))


def tell(row: dict[str, Any], results: Path | None, mode: str = "a") -> None:
    """Print a row of the table, and write it as a line of JSON."""
    print(line(row), flush=True)
    if results:
        with results.open(mode, encoding="utf-8") as file:
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n")


def line(row: dict[str, Any]) -> str:
    return "| {} | {} | {:.4f} | {:.4f} | {:,} | {:.2f} | {:.2f} | {:.3g} | {:.3g} | {:.1f} |".format(*row.values())


if __name__ == "__main__":
    main()
