"""pfl-research: FederatedAveraging on the simulated backend, one process.

    python contenders/pfl_research.py SPEC.json

pfl's data sets in memory do not shuffle; here they do, still without a DataLoader, which would be slower.
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from common import Job, Stopwatch, trained
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Shuffled(PyTorchTensorDataset):
    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, ...]]:
        for indices in torch.randperm(len(self)).split(batch_size or len(self)):
            yield tuple(tensor[indices] for tensor in self.raw_data)


class Classifier(nn.Module):
    """What pfl asks of a module. It would evaluate before and after the first round: no metrics, no work."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.network(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, object]:
        return {}


class Lap(TrainingProcessCallback):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self._watch.lap(trained(model.pytorch_model).values())
        return False, Metrics()


def main() -> None:
    job = Job.read(sys.argv[1])
    torch.manual_seed(job.seed)
    np.random.seed(job.seed)
    clients = job.clients()
    cohort = len(job.cohorts[0])
    module = Classifier(job.network())
    optimizer = partial(torch.optim.SGD, momentum=job.momentum, weight_decay=job.weight_decay)
    model = PyTorchModel(module, optimizer, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(
        lambda user: Shuffled(clients[user].tensors, user_id=str(user)), chain.from_iterable(job.cohorts).__next__
    )
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    rounds = len(job.cohorts)
    params = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=cohort, val_cohort_size=0
    )
    local = NNTrainHyperParams(local_num_epochs=job.epochs, local_learning_rate=job.lr, local_batch_size=job.batch)
    watch = Stopwatch(job)
    FederatedAveraging().run(params, backend, model, local, callbacks=[Lap(watch)], send_metrics_to_platform=False)
    watch.report("pfl_research", "pfl")


if __name__ == "__main__":
    main()
