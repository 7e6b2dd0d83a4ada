"""An accelerator compared with the processor: are the numbers the same, and how fast is a round?

    python benchmarks/device.py --device cuda [--rounds 4] [--out device.json]

Part one trains two rounds of every method on the digits in double precision (float32 where the device has no other), on
both devices, and shows how far the weights are apart; the draws are the same, because all of them happen on the
processor. On cuda it does so for CUDA graphs too. Part two times rounds of random images of CIFAR-10's shape with the
papers' networks, in float32, bf16 and with CUDA graphs, and counts how many clients the device trains at a time. Prints
two Markdown tables, and writes all to the JSON file.
"""

import argparse
import json
import platform
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedflat import Dataset, Samples, federate
from fedflat.federation import Federation
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.parser import parse
from fedflat.recipe import validated
from fedflat.rounds import conduct, first_state
from fedflat.runs.build import assemble
from fedflat.runs.launch import start_engine

NETWORKS = ("mlp", "fedavg-cnn", "resnet18-gn")
COHORT = 4  # whose weights are compared
CLIENTS, SAMPLES = 16, 150  # that are timed, as many as a device trains at a time


def rounds(federation: Federation, count: int, **table: Any) -> tuple[torch.Tensor, list[float], int]:
    """The weights at the end, the seconds of each round, and how many clients trained at a time."""
    server = {"rounds": count, "cohort": federation.clients}
    split = {"name": "given", "clients": federation.clients}
    local = {"epochs": 1, "batch": 50, "lr": 0.05, "momentum": 0.9}
    recipe = validated({"split": split, "server": server, "local": local, "evaluation": {"measures": []}, **table})
    problem = assemble(recipe, federation, None, parse(recipe.method))
    state, seconds = first_state(problem), list[float]()
    with closing(start_engine(problem, state)) as engine:
        for _ in range(count):
            begun = time.perf_counter()
            state, report = conduct(problem, state, engine, range(federation.clients))
            float(state.weights.sum())  # wait for the device
            seconds.append(time.perf_counter() - begun)
            if report.refused:
                raise RuntimeError(report.refused[0].detail)
    return state.weights.double().cpu(), seconds, problem.group


def agreement(device: str) -> dict[str, Any]:
    """How far the weights of each method are apart, relative to how far they moved; or why it failed."""
    federation = federate("digits", "dirichlet", COHORT, alpha=0.5, seed=0)
    precision = "float32" if device == "mps" else "float64"
    found: dict[str, Any] = {}
    cases = {method: (method, {"device": device}) for method in CATALOGUE}
    if device == "cuda":
        cases["fedavg, graphs"] = "fedavg", {"device": device, "graph": True}
    for case, (method, there) in cases.items():
        engines = {"device": "cpu", "name": "inline"}, there
        try:
            here, far = (rounds(federation, 2, method=method, precision=precision, engine=each)[0] for each in engines)
            found[case] = float((here - far).norm() / here.norm())
        except Exception as error:  # the report shall name every failure
            found[case] = f"{type(error).__name__}: {error}"
    return found


def speeds(device: str, count: int) -> list[dict[str, Any]]:
    """Samples per second of each network and precision, on the processor and on the device, there with graphs too."""
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (CLIENTS * SAMPLES, 3, 32, 32), generator=chance, dtype=torch.uint8)
    samples = Samples(images, torch.randint(0, 10, (len(images),), generator=chance))
    data = Dataset("random", samples, Samples(images[:1], samples.labels[:1]), 10, (0.5,), (0.25,))
    federation = federate(data, "iid", CLIENTS)
    settings = [("cpu", "float32", False), (device, "float32", False), (device, "bf16", False)]
    settings += [(device, "float32", True)] if device == "cuda" else []
    rows = []
    for model in NETWORKS:
        for where, precision, graph in settings:
            row = {"model": model, "device": where, "precision": precision, "graphs": graph}
            table = {"model": {"name": model}, "precision": precision, "engine": {"device": where, "graph": graph}}
            try:
                _, seconds, group = rounds(federation, count, **table)
                row |= {"samples_per_second": CLIENTS * SAMPLES / median(seconds[1:]), "clients_at_a_time": group}
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("device.json"))
    options = parser.parse_args()
    apart, rows = agreement(options.device), speeds(options.device, options.rounds)
    name = torch.cuda.get_device_name() if options.device == "cuda" and torch.cuda.is_available() else options.device
    about = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "system": sys.platform}
    options.out.write_text(json.dumps({**about, "apart": apart, "speeds": rows}, indent=1), "utf-8")
    print("| method | weights apart, relative |\n|---|---|")
    for method, far in apart.items():
        print(f"| {method} | {far if isinstance(far, str) else f'{far:.1e}'} |")
    print("\n| model | device | precision | samples/s | clients at a time |\n|---|---|---|---|---|")
    for row in rows:
        shown = row.get("failed") or f"{row['samples_per_second']:,.0f} | {row['clients_at_a_time']}"
        where = f"{row['device']}, graphs" if row["graphs"] else row["device"]
        print(f"| {row['model']} | {where} | {row['precision']} | {shown} |")
    return 1 if any(isinstance(far, str) for far in apart.values()) or any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
