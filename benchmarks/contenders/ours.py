"""fedflat: worker processes of one thread each.

python contenders/ours.py SPEC.json [precision=bf16] [workers=1] [method=fedsam] [engine=ray]
"""

import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
from common import LORA, Job, Stopwatch, fill
from jobs import NETWORKS

from fedflat import Dataset, Federation, Samples
from fedflat.federation.packed import Packed
from fedflat.local.rule import Outcome
from fedflat.local.step import train
from fedflat.methods.parser import parse
from fedflat.recipe import Recipe, validated
from fedflat.rounds import client
from fedflat.rounds.server import conduct, first_state
from fedflat.runs.build import assemble
from fedflat.runs.launch import start_engine


def recipe_of(job: Job, clients: int) -> Recipe:
    local = {"epochs": job.epochs, "batch": job.batch, "lr": job.lr}
    return validated(
        {
            "seed": job.seed,
            "precision": job.precision,
            "data": job.images,
            "split": {"name": "given", "clients": clients},
            "model": {"name": NETWORKS[job.model], **({"lora": LORA} if job.model == "gpt" else {})},
            "method": job.method,
            "local": local | {"momentum": job.momentum, "weight_decay": job.weight_decay},
            "server": {"rounds": len(job.cohorts), "cohort": max(map(len, job.cohorts)), "average": "samples"},
            "evaluation": {"measures": []},
            "engine": {"name": job.engine, "workers": job.workers},
        }
    )


def timed(*arguments: object) -> Outcome:
    """A client's local steps, and their time among the notes, divided by nᵢ m/N: the server weighs notes by samples."""
    begun = time.perf_counter()
    outcome = train(*arguments)  # type: ignore[arg-type]
    return replace(outcome, notes={"local_seconds": (time.perf_counter() - begun) / outcome.rule.share})


def main() -> None:
    options = dict(argument.split("=") for argument in sys.argv[2:])
    job = replace(Job.read(sys.argv[1]), **{k: int(v) if v.isdigit() else v for k, v in options.items()})
    inputs, labels, shards = job.arrays()
    samples, test = Samples(inputs, labels), Samples(inputs[:1], labels[:1])
    text = job.model in ("lstm", "gpt")
    kind = {"vocabulary": 80, "task": "next-token" if labels.ndim > 1 else "classification"} if text else {}
    data = Dataset(job.images, samples, test, 80 if text else 10, tuple(job.mean), tuple(job.std), **kind)
    recipe = recipe_of(job, len(shards))
    client.train = timed
    problem = assemble(
        recipe, Federation(data, Packed(shards.indices, np.diff(shards.offsets).tolist())), None, parse(job.method)
    )
    problem.network.weights.copy_(job.first_weights())
    if job.model == "gpt":
        frozen = [parameter for parameter in problem.network.module.parameters() if not parameter.requires_grad]
        fill(frozen, job.base())
    typical = len(shards.indices) / len(shards)
    held = [sum(len(shards[c]) for c in cohort) / len(cohort) for cohort in job.cohorts]
    watch, state, local = Stopwatch(job), first_state(problem), list[float]()
    with closing(start_engine(problem, state)) as engine:
        for cohort, samples_each in zip(job.cohorts, held, strict=True):
            state, report = conduct(problem, state, engine, cohort)
            watch.lap([state.weights])
            local.append(report.notes.get("local_seconds", 0.0) * samples_each / typical)
    watch.report("ours", "fedflat", local_seconds=local, workers=job.workers)


if __name__ == "__main__":
    main()
