"""The cost of curvature: products in gradients, landscapes in inference passes, eigenvalues beside other libraries.

    FEDFLAT_DATA=… python benchmarks/curvature.py [--repeats 9] [--images 2000] [--python ENV/bin/python]

1. A Hessian product ÷ a gradient on the same batches, with kept graphs and without, at the initial weights.
2. A point of a landscape of 25 × 25 ÷ a plain inference pass over the same 100 images in one batch, in turns.
3. Seconds for every layer of a CNN of 4,500 weights, and for λ1 of a small ViT, on 200 images.
4. The five largest eigenvalues and the trace of the FedAvg-CNN on CIFAR-10 images, after 200 steps of SGD, by fedflat,
   by curvlinops with SciPy's eigsh and by PyHessian, to the same tolerance 10⁻³, in one process. The other two get an
   environment of their own in the cache folder, if no Python that has them is given. `--others` and `--limit` bound the
   time: PyHessian takes long.

One thread, CPU time, in turns. Exits 1 if a bound is missed. Prints Markdown tables.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path
from time import process_time

import torch
import torch.nn.functional as F
from timing import interleaved, ratio
from torch import Tensor, nn

from engine import PACKAGES, TORCH, environment
from fedflat import federate, models
from fedflat.flatness import Hessian, Objective, filter_normalised, landscape, look, top_eigenvalues
from fedflat.tasks import TokenLoss

CASES = (("fedavg-cnn", "cifar10", 2.6), ("mlp", "mnist", 2.2), ("transformer", "tokens", 2.2), ("gpt", "tokens", 2.2))
SECOND = Path(__file__).parent / "contenders" / "eigenvalues.py"
SOURCES = Path(__file__).parents[1] / "src"
PACKAGES["curvature"] = [
    TORCH,
    "curvlinops-for-pytorch==3.0.1",
    "PyHessian==0.1",
    *(needed for needed in requires("fedflat") or [] if "extra" not in needed),
]


class Transformer(nn.Module):
    """A causal transformer of 1.1 M parameters over 64 tokens, with 80 different ones."""

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(80, width), nn.Parameter(0.02 * torch.randn(64, width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 80))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place
        later = torch.ones(64, 64, dtype=torch.bool).triu(1)
        for number, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            first, second = self.norms[2 * number], self.norms[2 * number + 1]
            q, k, v = qkv(first(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
            x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + mlp(second(x))
        return self.head(x).transpose(1, 2)


def objective(name: str, data: str, samples: int, batch: int) -> Objective:
    """The mean loss of an untrained network on the first training samples."""
    torch.manual_seed(0)
    if data == "tokens":
        tokens = torch.randint(0, 80, (samples, 65)).split(batch)
        batches = [(some[:, :-1], some[:, 1:]) for some in tokens]
        if name == "gpt":
            return Objective(models.build(name, (64,), 80, vocabulary=80, per_token=True), TokenLoss(), batches)
        return Objective(Transformer(), F.cross_entropy, batches)
    federation = federate(data, "iid", 1)
    batches = [federation.held_out("train", start, start + batch) for start in range(0, samples, batch)]
    return Objective(models.build(name, federation.dataset.shape, 10), F.cross_entropy, batches)


def products_in_gradients(repeats: int) -> bool:
    """Print time of ∇²f·v ÷ time of ∇f for each case; whether all keep the bound."""
    jobs = {}
    for name, data, _ in CASES:
        samples, batch = (64, 16) if data == "tokens" else (200, 100)
        f = objective(name, data, samples, batch)
        kept, v = Hessian(f), torch.randn(f.size, generator=torch.Generator().manual_seed(0))
        jobs |= {f"∇f {name}": f.gradient, f"kept {name}": lambda h=kept, v=v: h @ v}
        jobs |= {f"single {name}": lambda f=f, v=v: f.product(v)}
    seconds = interleaved(jobs, repeats, process_time)
    good = True
    print("| network, data | product ÷ gradient | quartiles | bound | a single product |\n|---|---|---|---|---|")
    for name, data, bound in CASES:
        middle, low, high = ratio(seconds[f"kept {name}"], seconds[f"∇f {name}"])
        single, _, _ = ratio(seconds[f"single {name}"], seconds[f"∇f {name}"])
        good &= middle <= bound
        print(f"| {name}, {data} | {middle:.2f} | {low:.2f}–{high:.2f} | ≤ {bound} | {single:.2f} |", flush=True)
    return good


class Alternating(Objective):
    """Makes a plain inference pass after each point of a landscape, and keeps the CPU time of both."""

    def value(self) -> float:
        found = super().value()
        done = process_time()
        self.points.append(done - self.begun)
        with torch.no_grad():
            for images, _ in self.batches:
                self.module(images)
        self.begun = process_time()
        self.passes.append(self.begun - done)
        return found

    def surface(self, plane: Tensor) -> None:
        self.points, self.passes = list[float](), list[float]()
        self.begun = process_time()
        landscape(self, plane, points=25)


def landscape_in_passes() -> bool:
    """Print time of a point of a surface of 25 × 25 ÷ time of an inference pass; whether it keeps the bound."""
    plain = objective("fedavg-cnn", "cifar10", 100, 100)
    f = Alternating(plain.module, plain.loss, plain.batches)
    f.surface(filter_normalised(f))
    middle, low, high = ratio(f.points, f.passes)
    whole = sum(f.points) / sum(f.passes)
    print(
        f"\n25 × 25 points: {whole:.3f} inference passes a point; median {middle:.3f} ({low:.3f}–{high:.3f}) over the "
    )
    print("points, each beside a pass of its own. Bound: ≤ 1.05.", flush=True)
    return whole <= 1.05


def examples() -> bool:
    """Print the CPU time of two measurements that a person waits for."""
    torch.manual_seed(0)
    federation = federate("cifar10", "iid", 1)
    images, labels = federation.held_out("train", 0, 200)
    small = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )
    vit = objective("sl-vit", "cifar10", 200, 100)
    jobs = {
        "every layer of a small CNN": (small, lambda: look(small, (images, labels), by_layer=True)),
        "λ1 of sl-vit to 10⁻²": (vit.module, lambda: top_eigenvalues(Hessian(vit), 1, 1e-2)),
    }
    print("\n| 200 images of CIFAR-10 | parameters | seconds of CPU |\n|---|---|---|")
    for name, (module, job) in jobs.items():
        begun = process_time()
        job()
        size = sum(parameter.numel() for parameter in module.parameters())
        print(f"| {name} | {size:,} | {process_time() - begun:.1f} |", flush=True)
    return True


def beside_others(images: int, limit: float, others: list[str], python: str) -> bool:
    """Train, then let the script in the other environment print its table."""
    f = objective("fedavg-cnn", "cifar10", images, 100)
    descent = torch.optim.SGD(f.module.parameters(), lr=0.02, momentum=0.9)
    for step in range(200):
        inputs, labels = f.batches[step % len(f.batches)]
        descent.zero_grad()
        F.cross_entropy(f.module(inputs[:50]), labels[:50]).backward()
        descent.step()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "problem.pt"
        torch.save((f.module.state_dict(), list(f.batches)), place)
        surroundings = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        return subprocess.run([python, SECOND, place, str(limit), *others], env=surroundings).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--images", type=int, default=2000, help="for the eigenvalues")
    parser.add_argument("--limit", type=float, default=20, help="stop one of the others after this many times our time")
    parser.add_argument(
        "--others", nargs="+", default=["curvlinops", "PyHessian"], help="for the eigenvalues, in turns"
    )
    parser.add_argument("--python", help="a Python with fedflat's requirements, curvlinops and PyHessian")
    parser.add_argument("--parts", nargs="+", default=["products", "landscape", "examples", "eigenvalues"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "products": lambda: products_in_gradients(options.repeats),
        "landscape": landscape_in_passes,
        "examples": examples,
        "eigenvalues": lambda: beside_others(
            options.images, options.limit, options.others, options.python or environment("curvature")
        ),
    }
    kept = [parts[name]() for name in options.parts]  # all of them, also after a missed bound
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
