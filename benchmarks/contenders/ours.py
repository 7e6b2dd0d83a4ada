"""fedflat: worker processes of one thread each.

python contenders/ours.py SPEC.json
"""

import sys
from contextlib import closing

import torch.nn.functional as F
from common import Job, Stopwatch

from fedflat import Dataset, Federation, Samples
from fedflat.methods import parse
from fedflat.recipe import Recipe, validated
from fedflat.run import assemble, start_engine
from fedflat.server import conduct, first_state

MODELS = {"cnn": "fedavg-cnn", "mlp": "mlp"}


def recipe_of(job: Job, clients: int) -> Recipe:
    local = {"epochs": job.epochs, "batch": job.batch, "lr": job.lr}
    return validated(
        {
            "seed": job.seed,
            "precision": job.precision,
            "data": job.images,
            "split": {"name": "given", "clients": clients},
            "model": MODELS[job.model],
            "local": local | {"momentum": job.momentum, "weight_decay": job.weight_decay},
            "server": {"rounds": len(job.cohorts), "cohort": max(map(len, job.cohorts)), "average": "samples"},
            "evaluation": {"measures": []},
            "engine": {"name": "auto", "workers": job.workers},
        }
    )


def main() -> None:
    job = Job.read(sys.argv[1])
    inputs, labels, shards = job.arrays()
    train, test = Samples(inputs, labels), Samples(inputs[:1], labels[:1])
    data = Dataset(job.images, train, test, 10, tuple(job.mean), tuple(job.std))
    recipe = recipe_of(job, len(shards))
    problem = assemble(recipe, Federation(data, tuple(shards)), None, parse("fedavg"), F.cross_entropy)
    problem.network.weights.copy_(job.first_weights())
    watch, state = Stopwatch(job), first_state(problem)
    with closing(start_engine(problem, recipe, state)) as engine:
        for cohort in job.cohorts:
            state, _ = conduct(problem, recipe.server, state, engine, cohort)
            watch.lap([state.weights])
    watch.report("ours", "fedflat")


if __name__ == "__main__":
    main()
