"""The script that people write: a deep copy of the model for each client, a DataLoader, an average of what it trains.

python contenders/naive.py SPEC.json
"""

import sys
from copy import deepcopy

import torch
from common import Job, Stopwatch, fit, trained


def main() -> None:
    job = Job.read(sys.argv[1])
    torch.manual_seed(job.seed)
    clients, model = job.clients(), job.network()
    watch = Stopwatch(job)
    for cohort in job.cohorts:
        held = [clients[client] for client in cohort]
        total = sum(map(len, held))
        average: dict[str, torch.Tensor] = {}
        for samples in held:
            local = deepcopy(model)
            fit(local, samples, job)
            for name, tensor in trained(local).items():
                average[name] = average.get(name, 0) + tensor * (len(samples) / total)
        model.load_state_dict(average, strict=False)
        watch.lap(trained(model).values())
    watch.report("naive")


if __name__ == "__main__":
    main()
