"""Commands that analyse the minima of finished runs: flatness, landscape, duality."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.app import JsonOption, TrustOption, app, out
from fedflat.progress import progress

if TYPE_CHECKING:  # torch takes seconds to import, and `fedflat --help` must not wait for it
    from fedflat.federation.population import Federation
    from fedflat.flatness import Curvature, Duality, Portion, Spectrum, Theory
    from fedflat.local.rule import Batch
    from fedflat.rounds.client import Problem

Runs = Annotated[list[Path], typer.Argument(help="directories of finished runs")]
Samples = Annotated[int, typer.Option(help="training samples to measure on, drawn by the seed; 0 = all", min=0)]
Seed = Annotated[int, typer.Option(help="seed of samples, probes and directions", min=0)]
Picture = Annotated[Path | None, typer.Option("-o", "--out", help="where to draw (.png, .svg, .pdf)")]
MEASURED = "mean training loss of {samples} samples (evaluation mode, no decay, no augmentation)"


class Parameters(StrEnum):
    """The weights that the loss is a function of."""

    trained = "trained"
    all = "all"


ParametersOption = Annotated[
    Parameters, typer.Option(help="weights to vary: those that were trained, or all, with adapters merged")
]


class Plane(StrEnum):
    """The directions of a landscape."""

    eigen = "eigen"
    random = "random"


@app.command()
def flatness(
    runs: Runs,
    k: Annotated[int, typer.Option(help="how many eigenvalues", min=1, max=100)] = 5,
    samples: Samples = 1000,
    probes: Annotated[int, typer.Option(help="random probes of the traces", min=5)] = 12,
    rho: Annotated[float, typer.Option(help="radius of the sharpness measures", min=0)] = 0.05,
    adaptive_rho: Annotated[float, typer.Option(help="radius of the adaptive one", min=0)] = 0.5,
    layers: Annotated[bool, typer.Option("--layers", help="every layer, with its activations and MAN's bound")] = False,
    theory: Annotated[bool, typer.Option("--theory", help="MAN's inequalities, layer by layer and by client")] = False,
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="whether a layer's block has its bias")] = True,
    density: Annotated[int, typer.Option(help="Lanczos steps of the spectral density; 0 = none", min=0)] = 0,
    federated: Annotated[
        bool, typer.Option("--federated", help="spectrum by the clients' products; with --layers each client's own")
    ] = False,
    parameters: ParametersOption = Parameters.trained,
    seed: Seed = 0,
    picture: Picture = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Spectrum and trace of the Hessian, sharpness and norms of the global models of finished runs or checkpoints.

    With --density and -o the density of the eigenvalues is drawn. The numbers go to RUN/flatness.json too, where
    `fedflat report` finds them.
    """
    from fedflat import flatness as flat
    from fedflat.errors import RecipeError
    from fedflat.flatness.spectral import draw_density
    from fedflat.runs.build import load_run

    if federated and theory:
        raise RecipeError("--theory compares the clients with the pooled samples; leave --federated out")
    if picture and not density:
        raise RecipeError("-o draws the spectral density: say by --density with how many Lanczos steps, for example 80")
    portion, rows, densities = flat.Portion(samples, seed), list[dict[str, Any]](), dict[str, flat.Density]()
    theories, clients = dict[str, flat.Theory](), dict[str, list[flat.Curvature]]()
    for run in _checked(runs):
        with progress(f"{run}: measuring"):
            problem = load_run(run, parameters=parameters.value)
            if federated:
                found, seen = _by_clients(problem, portion, k, probes, density)
                if layers:
                    clients[str(run)] = flat.client_curvatures(problem, portion, seed, bias)
                    found["clients"] = [asdict(each) for each in clients[str(run)]]
            else:
                whole = flat.measure(portion.pooled(problem), k, probes, rho, adaptive_rho, layers, density, seed, bias)
                found, seen = asdict(whole), whole.spectrum
            if theory:
                theories[str(run)] = flat.theory(problem, portion, seed, bias)
                found["theory"] = _with_sums(theories[str(run)])
        if seen.density:
            densities[str(run)] = seen.density
        found["spectrum"] = {**asdict(seen), "ratio": seen.ratio}
        rows.append({"run": str(run), "method": problem.recipe.method, **found})
        if not federated:
            _keep(run, rows[-1])
    if picture:
        draw_density(densities, picture)
    if as_json:
        print_json({"measured": MEASURED.format(samples=rows[0]["samples"]), "k": k, "bias": bias, "runs": rows})
        return
    _print_tables(rows, theories, clients, bias)


def _keep(run: Path, row: dict[str, Any]) -> None:
    """Write what was measured into the run's directory, where the report finds it."""
    from fedflat.runs.folder import beside, write_whole, written_to

    kept = {name: value for name, value in row.items() if name not in ("run", "theory", "clients")}
    place = beside(run, "flatness.json")
    with written_to(place, "make room, then measure again"):
        write_whole(place, json.dumps(_plain(kept), indent=2).encode() + b"\n")


def _by_clients(
    problem: Problem, portion: Portion, k: int, probes: int, density: int
) -> tuple[dict[str, Any], Spectrum]:
    """Compute the spectrum from products that the clients compute."""
    from fedflat.flatness import FederatedHessian, HessianProduct, spectrum
    from fedflat.rounds.server import first_state
    from fedflat.runs.build import start_engine

    state = first_state(problem)
    with closing(start_engine(problem, state, HessianProduct(portion))) as engine:
        operator = FederatedHessian(engine, state, problem, portion)
        return {"samples": operator.samples}, spectrum(operator, k, probes, steps=density, seed=portion.seed)


def _with_sums(found: Theory) -> dict[str, Any]:
    """Add the quantities that the inequalities compare to the terms they are made of."""
    return {"clients_sum": found.clients_sum, "blocks_sum": found.pooled.blocks_sum, **asdict(found)}


def _print_tables(
    rows: list[dict[str, Any]], theories: dict[str, Theory], clients: dict[str, list[Curvature]], bias: bool
) -> None:
    from fedflat.report.flatness_table import flatness_table, layer_table
    from fedflat.report.theory_table import client_table, theory_table

    measured, methods = MEASURED.format(samples=rows[0]["samples"]), [row["method"] for row in rows]
    blocks = f"{measured}; a layer's block is its weight{' and bias' if bias else ' alone'}"
    what = "Hessian, sharpness and norms" if "loss" in rows[0] else "Hessian, by products of the clients"
    out.print(flatness_table(rows, f"{what}: {measured}"))
    for row in rows:
        if row.get("layers"):
            out.print(layer_table(row))
    if clients:
        out.print(client_table(clients, methods, blocks))
    if theories:
        out.print(theory_table(theories, methods, blocks))


@app.command()
def landscape(
    runs: Runs,
    plane: Annotated[Plane, typer.Option(help="the top eigenvectors, or random filter-normalised")] = Plane.eigen,
    dimensions: Annotated[int, typer.Option(help="1: a line, 2: a plane", min=1, max=2)] = 2,
    span: Annotated[float, typer.Option(help="from −span to span along each direction")] = 1.0,
    points: Annotated[int, typer.Option(help="points along each direction", min=3)] = 25,
    samples: Samples = 1000,
    parameters: ParametersOption = Parameters.trained,
    seed: Seed = 0,
    picture: Picture = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """The loss around the global models of finished runs or checkpoints, on one grid.

    Arrays go to RUN/landscape-PLANE.npz; those of a checkpoint carry its round in their name.
    """
    from fedflat.errors import RecipeError
    from fedflat.flatness import Portion
    from fedflat.flatness import landscape as walk
    from fedflat.runs.build import load_run
    from fedflat.runs.folder import beside

    if not 0 < span < math.inf:
        raise RecipeError(f"--span {span}: it must be a positive number")
    found = {}
    for run in _checked(runs):
        problem = load_run(run, parameters=parameters.value)
        objective = Portion(samples, seed).pooled(problem)
        with progress(str(run)):
            found[str(run)] = walk(objective, plane.value, span, points, dimensions, seed)
        found[str(run)].save(beside(run, f"landscape-{plane.value}.npz"))
    header = (
        f"{MEASURED.format(samples=objective.samples)} on the {plane.value} {'line' if dimensions == 1 else 'plane'}"
    )
    if picture:
        from fedflat.flatness.terrain import draw_landscapes

        draw_landscapes(found, picture)
    if as_json:
        runs_found = [
            {"run": name, "centre": f.centre, "rise": f.rise, "axes": f.axes.tolist(), "values": f.values.tolist()}
            for name, f in found.items()
        ]
        print_json({"measured": header, "plane": plane.value, "span": span, "runs": runs_found})
        return
    from fedflat.report.flatness_table import landscape_table

    out.print(landscape_table(found, header, span))
    if picture:
        out.print(f"drawn to {picture}", markup=False, highlight=False)


@app.command()
def duality(
    runs: Runs,
    layer: Annotated[
        list[str] | None, typer.Option(help="layer by name, again for more; else every linear one")
    ] = None,
    k: Annotated[int, typer.Option(help="directions of a layer too large for a full basis", min=1)] = 50,
    pairs: Annotated[int, typer.Option(help="pairs of each pairing at most; 0 = all", min=0)] = 1000,
    samples: Annotated[
        int, typer.Option(help="training samples: of the gap, the pairs and the Hessian; 0 = all", min=0)
    ] = 4000,
    test_samples: Annotated[int, typer.Option(help="test samples: of the gap and the pairs; 0 = all", min=0)] = 0,
    parameters: ParametersOption = Parameters.trained,
    seed: Seed = 0,
    picture: Picture = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Activity–weight duality: which directions of a layer carry the generalisation gap of finished runs.

    Shows the gap between test and training loss beside both pairings: each training sample with its nearest test
    sample of the same class (the paper's), and each test sample with its nearest training sample (the authors' demo).
    """
    from torch import nn

    from fedflat.flatness import layers_of
    from fedflat.flatness.duality import decompose as analyse
    from fedflat.runs.build import load_run

    rows, results = list[dict[str, Any]](), {}
    for run in _checked(runs):
        problem = load_run(run, parameters=parameters.value)
        module = problem.network.module
        train, test = _halves(problem.federation, samples, test_samples, seed)
        for name in layer or [n for n in layers_of(module) if isinstance(module.get_submodule(n), nn.Linear)]:
            with progress(f"{run}: {name}"):
                result = analyse(module, problem.loss, train, test, name, k, pairs, samples=0, seed=seed)
            results[f"{run} {name}"] = result
            rows.append({"run": str(run), "method": problem.recipe.method, **_duality_row(result)})
    header = (
        f"generalisation gap of {len(train[1])} training and {len(test[1])} test samples beside that of their pairs, "
        "in the eigenbasis of each layer's Hessian"
    )
    if picture:
        from fedflat.flatness.dual import draw_duality

        draw_duality(results, picture)
    if as_json:
        print_json({"measured": header, "layers": rows})
        return
    from fedflat.report.flatness_table import duality_table

    out.print(duality_table(results, header))
    if picture:
        out.print(f"drawn to {picture}", markup=False, highlight=False)


def _halves(federation: Federation, samples: int, test_samples: int, seed: int) -> tuple[Batch, Batch]:
    """Training samples of all clients, and test samples; 0 means all."""
    import torch

    from fedflat.flatness import Portion
    from fedflat.flatness.pairing import drawn

    parts = Portion(samples, seed).batches(federation, range(federation.clients))
    inputs, labels = zip(*parts, strict=True)
    test = federation.held_out("test", 0, federation.size("test"))
    some = drawn(torch.arange(len(test[1])), test_samples, seed)
    return (torch.cat(inputs), torch.cat(labels)), (test[0][some], test[1][some])


def _duality_row(result: Duality) -> dict[str, Any]:
    """All numbers of a layer, including derived ones."""
    named = ("remainder", "fluctuation", "drift", "envelope", "size", "sharpness", "participation")
    pairings = {
        direction: asdict(found)
        | {name: getattr(found, name) for name in named}
        | {"correlations": asdict(found.correlations)}
        for direction, found in result.pairings.items()
    }
    return {**asdict(result), "gap": result.gap, "pairings": pairings}


def _checked(runs: list[Path]) -> list[Path]:
    """Check that all runs can be read before anything is measured."""
    from fedflat.runs.build import load_run

    for run in runs:
        load_run(run)
    return runs


def print_json(content: dict[str, Any]) -> None:
    """Print numbers, tensors and arrays as JSON."""
    print(json.dumps(_plain(content), indent=2))


def _plain(value: Any) -> Any:
    """Convert to JSON types: lists for tensors, null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
