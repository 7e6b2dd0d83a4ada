"""FedLab: its standalone pipeline with the serial trainer, one process.

    python contenders/fedlab.py SPEC.json

Its trainer shares one optimiser between clients and its handler averages uniformly; momentum must start anew and the
job weighs by samples, so these two lines are ours. It sends all of a network; frozen weights stay here.
"""

import sys
from types import ModuleType

import torch
from common import Job, Stopwatch, fill, trained

# This file has the package's name, and the folder of a script comes first on the path.
sys.path.pop(0)
# FedLab's ready-made data sets import torchvision, whose wheels do not fit every torch; none of them is used here.
for name in ("torchvision", "torchvision.transforms"):
    sys.modules.setdefault(name, ModuleType(name))

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.model_maintainer import ModelMaintainer  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from fedlab.utils import Aggregators  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Federation(FedDataset):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self._clients = job.clients()
        self.num = len(self._clients)

    def get_dataset(self, id: int, type: str = "train") -> TensorDataset:
        return self._clients[id]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.get_dataset(id), batch_size=batch_size, shuffle=True)


class Thrifty(ModelMaintainer):
    """Reads and writes only what is trained: an average of equal frozen weights would differ from them by rounding."""

    def set_model(self, parameters: Tensor) -> None:
        fill(trained(self._model).values(), parameters)

    @property
    def model_parameters(self) -> Tensor:
        return torch.cat([tensor.view(-1) for tensor in trained(self._model).values()])


class Trainer(Thrifty, SGDSerialClientTrainer):
    def setup_job(self, job: Job) -> None:
        self.setup_optim(job.epochs, job.batch, job.lr)
        self._sgd = {"lr": job.lr, "momentum": job.momentum, "weight_decay": job.weight_decay}

    def train(self, model_parameters: Tensor, train_loader: DataLoader) -> list[Tensor]:
        self.optimizer = torch.optim.SGD(self._model.parameters(), **self._sgd)
        return [*super().train(model_parameters, train_loader), torch.tensor(float(len(train_loader.dataset)))]


class Handler(Thrifty, SyncServerHandler):
    def __init__(self, job: Job, clients: int, watch: Stopwatch) -> None:
        super().__init__(job.network(), len(job.cohorts), len(job.cohorts[0]) / clients)
        self._cohorts, self._watch = job.cohorts, watch

    @property
    def num_clients_per_round(self) -> int:
        return len(self._cohorts[self.round])

    def sample_clients(self) -> list[int]:
        return self._cohorts[self.round]

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        models, samples = zip(*buffer, strict=True)
        self.set_model(Aggregators.fedavg_aggregate(list(models), torch.stack(samples)))
        self._watch.lap(trained(self.model).values())


class Pipeline(StandalonePipeline):
    def evaluate(self) -> None:
        """Not part of the job."""


def main() -> None:
    job = Job.read(sys.argv[1])
    torch.manual_seed(job.seed)
    clients = Federation(job)
    trainer = Trainer(job.network(), len(clients))
    trainer.setup_dataset(clients)
    trainer.setup_job(job)
    watch = Stopwatch(job)
    Pipeline(Handler(job, len(clients), watch), trainer).main()
    watch.report("fedlab", "fedlab")


if __name__ == "__main__":
    main()
