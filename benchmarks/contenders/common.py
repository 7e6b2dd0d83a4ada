"""What the contenders share: the job of a SPEC.json, the network as one usually writes it, the clock and the report."""

import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from processes import age, cpu_seconds, pss_mb
from sequences import ALPHA, RANK, adapted_gpt, characters
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CHECKED = 5000  # samples for the loss by which a driver sees that all contenders train the same
LORA = {"rank": RANK, "alpha": ALPHA, "targets": "attention"}


@dataclass(frozen=True)
class Job:
    """FedAvg on explicit cohorts, one for each round; `data` and `initial` are .npz files.

    Bytes are normalised to (x/255 − mean)/std, other inputs stay as they are. `workers` are processes of ours or actors
    of Flower; `precision`, `method` and `engine` are for ours.
    """

    name: str
    model: str
    images: str
    data: str
    initial: str
    cohorts: list[list[int]]
    epochs: int
    batch: int
    lr: float
    momentum: float
    weight_decay: float
    seed: int
    mean: list[float]
    std: list[float]
    workers: int
    precision: str = "float32"
    method: str = "fedavg"
    engine: str = "auto"

    @classmethod
    def read(cls, path: str) -> "Job":
        return cls(**json.loads(Path(path).read_text("utf-8")))

    def arrays(self) -> tuple[Tensor, Tensor, "Shards"]:
        """All inputs, all labels, and each client's indices."""
        with np.load(self.data, allow_pickle=False) as file:
            inputs, labels, indices, offsets = (file[name] for name in ("inputs", "labels", "indices", "offsets"))
        return torch.from_numpy(inputs), torch.from_numpy(labels), Shards(torch.from_numpy(indices), offsets)

    def client_count(self) -> int:
        with np.load(self.data, allow_pickle=False) as file:
            return len(file["offsets"]) - 1

    def clients(self) -> Sequence[TensorDataset]:
        """Each client's samples."""
        inputs, labels, shards = self.arrays()
        clients = Clients(inputs, labels, shards)
        # Clients that draw from the same samples could have more than fits into memory.
        return clients if len(shards.indices) > len(inputs) else list(clients)

    def first_weights(self) -> Tensor:
        with np.load(self.initial, allow_pickle=False) as file:
            return torch.from_numpy(file["weights"])

    def base(self) -> Tensor:
        """The frozen weights."""
        with np.load(self.initial, allow_pickle=False) as file:
            return torch.from_numpy(file["base"])

    def network(self, weights: Tensor | None = None) -> nn.Module:
        """The plain network, with the job's initial weights unless others are given, and its frozen ones if it has."""
        model = nn.Sequential(Normalise(self.mean, self.std), *LAYERS[self.model]())
        fill(trained(model).values(), self.first_weights() if weights is None else weights)
        if self.model == "gpt":
            fill((p for p in model.parameters() if not p.requires_grad), self.base())
        return model


class Shards(Sequence[Tensor]):
    """Each client's indices, as slices that are made when asked for: a million of them would take half a GB."""

    def __init__(self, indices: Tensor, offsets: np.ndarray) -> None:
        self.indices, self.offsets = indices, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        if client >= len(self):
            raise IndexError(client)
        return self.indices[self.offsets[client] : self.offsets[client + 1]]


class Clients(Sequence[TensorDataset]):
    """Each client's samples, copied when asked for."""

    def __init__(self, inputs: Tensor, labels: Tensor, shards: Shards) -> None:
        self.inputs, self.labels, self.shards = inputs, labels, shards

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, client: int) -> TensorDataset:
        shard = self.shards[client]
        return TensorDataset(self.inputs[shard], self.labels[shard])


def trained(model: nn.Module) -> dict[str, Tensor]:
    """What clients train, send and average: all but what is frozen."""
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def fill(tensors: Iterable[Tensor], vector: Tensor) -> None:
    """Write a vector into tensors, in their order."""
    tensors = [tensor.data for tensor in tensors]
    for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class Normalise(nn.Module):
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() / 255 - self.mean) / self.std if x.dtype == torch.uint8 else x


def _cnn() -> list[nn.Module]:
    """The FedAvg-CNN: 2,156,490 parameters."""
    return [
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10),
    ]  # fmt: skip


def _mlp() -> list[nn.Module]:
    """784-200-200-10: 199,210 parameters."""
    return [nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(2, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(2, outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride == 2:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.GroupNorm(2, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def _resnet() -> list[nn.Module]:
    """ResNet-18 with GroupNorm and the stem for large images: 11,181,642 parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(2, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Residual(inputs, outputs) for inputs, outputs in pairwise(widths)]
    return [*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]


def _lenet() -> list[nn.Module]:
    """LeNet with 64 filters: 797,962 parameters."""
    return [
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10),
    ]  # fmt: skip


def _vgg() -> list[nn.Module]:
    """VGG-11 without normalisation: 9,750,922 parameters."""
    widths, pooled = (3, 64, 128, 256, 256, 512, 512, 512, 512), (1, 1, 0, 1, 0, 1, 0, 1)
    layers: list[nn.Module] = []
    for (inputs, outputs), pool in zip(pairwise(widths), pooled, strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), *[nn.MaxPool2d(2)] * pool]
    hidden = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return [*layers, nn.Flatten(), *hidden]


LAYERS = {
    "cnn": _cnn,
    "mlp": _mlp,
    "resnet": _resnet,
    "lenet": _lenet,
    "vgg": _vgg,
    "lstm": characters,
    "gpt": adapted_gpt,
}


def fit(model: nn.Module, samples: TensorDataset, job: Job) -> None:
    """A client's epochs, as a script usually has them."""
    optimizer = torch.optim.SGD(model.parameters(), job.lr, momentum=job.momentum, weight_decay=job.weight_decay)
    loader = DataLoader(samples, batch_size=job.batch, shuffle=True)
    model.train()
    for _ in range(job.epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


class Stopwatch:
    """Times the rounds; looks at weights and memory only while the clock stands."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._seconds: list[float] = []
        self.resume()

    def resume(self) -> None:
        self._begun = time.perf_counter()

    def lap(self, weights: Iterable[Tensor]) -> None:
        """A round has ended with these weights."""
        self._seconds.append(time.perf_counter() - self._begun)
        # Only twice: to look at all processes takes as long as a small round, in which the workers' caches go cold.
        if len(self._seconds) == len(self._job.cohorts):
            self._cpu = cpu_seconds() - self._cpu
            self._memory, self._last = pss_mb(), _flat(weights)
        elif len(self._seconds) == 1:
            self._first_round, self._after_first = age(), _flat(weights)
            self._cpu = cpu_seconds()
        self.resume()

    def report(self, contender: str, *packages: str, **more: object) -> None:
        """The one line of JSON that the driver reads."""
        inputs, labels, shards = self._job.arrays()
        names = ("torch", "numpy", *packages)
        line = {
            "contender": contender,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
            "seconds": self._seconds,
            "cpu_seconds": self._cpu,
            "first_round": self._first_round,
            "samples": [self._job.epochs * sum(len(shards[c]) for c in cohort) for cohort in self._job.cohorts],
            "loss_after_first_round": _loss(self._job.network(self._after_first), inputs[:CHECKED], labels[:CHECKED]),
            "pss_mb": self._memory,
            "weights_norm": float(self._last.norm()),
            **more,
        }
        sys.stdout.flush()
        print(json.dumps(line), flush=True)


def _flat(weights: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in weights])


@torch.no_grad()
def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    model.eval()
    batches = zip(inputs.split(500), labels.split(500), strict=True)
    return sum(float(F.cross_entropy(model(x), y, reduction="sum")) for x, y in batches) / len(labels)
