"""The script that people write: a deep copy of the model for each client, a DataLoader, an average of state dicts.

python contenders/naive.py SPEC.json
"""

import sys
from copy import deepcopy

import torch
from common import Job, Stopwatch, fit


def main() -> None:
    job = Job.read(sys.argv[1])
    torch.manual_seed(job.seed)
    clients, model = job.clients(), job.network()
    watch = Stopwatch(job)
    for cohort in job.cohorts:
        total = sum(len(clients[client]) for client in cohort)
        average: dict[str, torch.Tensor] = {}
        for client in cohort:
            local = deepcopy(model)
            fit(local, clients[client], job)
            for name, tensor in local.state_dict().items():
                average[name] = average.get(name, 0) + tensor * (len(clients[client]) / total)
        model.load_state_dict(average)
        watch.lap(model.parameters())
    watch.report("naive")


if __name__ == "__main__":
    main()
