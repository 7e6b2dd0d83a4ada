"""fluke: its FedAvg with its server, clients and fast data loaders, one process.

    python contenders/fluke.py SPEC.json

Clients keep neither model nor optimiser between rounds (`persistency=False`), because the job's momentum starts anew.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from common import Clients, Job, Stopwatch, trained

# This file has the package's name, and the folder of a script comes first on the path.
sys.path.pop(0)


class Absent(ModuleType):
    """A module that has an empty class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class WithoutVision(MetaPathFinder, Loader):
    """fluke and torchmetrics import torchvision, whose wheels do not fit every torch; nothing of it is used here."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        vision = fullname.partition(".")[0] == "torchvision"
        return ModuleSpec(fullname, self, is_package=True) if vision else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


sys.meta_path.insert(0, WithoutVision())

from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.server import Server  # noqa: E402
from torch import Tensor, nn  # noqa: E402


class Batches(FastDataLoader):
    """fluke's loader of a client's indices, whose samples are copied batch by batch."""

    def __init__(self, inputs: Tensor, labels: Tensor, shard: Tensor, **settings: Any) -> None:
        super().__init__(shard, **settings)
        self._inputs, self._labels = inputs, labels

    def __next__(self) -> tuple[Tensor, Tensor]:
        (indices,) = super().__next__()
        return self._inputs[indices], self._labels[indices]


def loaders(job: Job) -> list[FastDataLoader]:
    """Each client's loader. Copies of samples that clients share might not fit into memory."""
    settings = {"num_labels": 10, "batch_size": job.batch, "shuffle": True, "skip_singleton": False}
    clients = job.clients()
    if isinstance(clients, Clients):
        return [Batches(clients.inputs, clients.labels, shard, **settings) for shard in clients.shards]
    return [FastDataLoader(*samples.tensors, **settings) for samples in clients]


class Named(Server):
    """fluke's server with given cohorts."""

    def __init__(self, job: Job, clients: Sequence[Client]) -> None:
        super().__init__(job.network(), None, clients, weighted=True)
        self._cohorts, self.watch = iter(job.cohorts), Stopwatch(job)

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        return [self.clients[index] for index in next(self._cohorts)]

    def aggregate(self, eligible: Sequence[Client], client_models: Iterable[nn.Module]) -> None:
        frozen = [parameter.data for parameter in self.model.parameters() if not parameter.requires_grad]
        before = [tensor.clone() for tensor in frozen]
        super().aggregate(eligible, client_models)
        # It averages all of the model: an average of equal frozen weights differs from them by rounding.
        for tensor, kept in zip(frozen, before, strict=True):
            tensor.copy_(kept)
        self.watch.lap(trained(self.model).values())


class Rounds(FedAVG):
    """fluke's rounds without evaluation, which is not part of the job."""

    def _compute_evaluation(self, round: int, eligible: Sequence[Client]) -> None: ...

    def finalize(self) -> None: ...


def main() -> None:
    job = Job.read(sys.argv[1])
    torch.manual_seed(job.seed)
    np.random.seed(job.seed)
    sgd = {"name": "SGD", "lr": job.lr, "momentum": job.momentum, "weight_decay": job.weight_decay}
    optimizer, loss = OptimizerConfigurator(sgd), nn.CrossEntropyLoss()
    clients = [
        Client(index, loader, None, optimizer, loss, job.epochs, persistency=False)
        for index, loader in enumerate(loaders(job))
    ]
    server = Named(job, clients)
    rounds = Rounds(len(clients), None, {}, clients, server)
    server.watch.resume()
    rounds.run(len(job.cohorts), len(job.cohorts[0]) / len(clients))
    server.watch.report("fluke", "fluke-fl")


if __name__ == "__main__":
    main()
