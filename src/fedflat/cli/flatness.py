"""Commands that analyse the minima of finished runs: flatness and landscape."""

import json
import math
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.app import JsonOption, TrustOption, app, out, show
from fedflat.cli.geometry import (
    By,
    MatrixName,
    WeightsName,
    differences,
    groups_of,
    locality_of,
    locality_record,
    print_geometry,
)

if TYPE_CHECKING:  # torch takes seconds to import, and `fedflat --help` must not wait for it
    from fedflat.flatness import Curvature, Matrix, Portion, Spectrum, Theory, Weights
    from fedflat.recipe import Recipe
    from fedflat.rounds.setup import Problem

Runs = Annotated[list[Path], typer.Argument(help="directories of finished runs")]
Samples = Annotated[int, typer.Option(help="training samples to measure on, drawn by the seed; 0 = all", min=0)]
Seed = Annotated[int, typer.Option(help="seed of samples, probes and directions", min=0)]
Picture = Annotated[Path | None, typer.Option("-o", "--out", help="file to write (.png, .svg, .pdf)")]
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
    products: Annotated[
        int,
        typer.Option("--products", "--probes", help="number of matrix products for a trace (--probes in 0.1)", min=6),
    ] = 32,
    relative_error: Annotated[
        float | None,
        typer.Option(help="take more products until the trace's relative error is below this, such as 0.05"),
    ] = None,
    matrix: Annotated[MatrixName, typer.Option(help="matrix whose spectrum is computed")] = MatrixName.hessian,
    rho: Annotated[float, typer.Option(help="radius of the sharpness measures", min=0)] = 0.05,
    adaptive_rho: Annotated[float, typer.Option(help="radius of the adaptive sharpness", min=0)] = 0.5,
    layers: Annotated[bool, typer.Option("--layers", help="every layer, with its activations and MAN's bound")] = False,
    by: Annotated[By, typer.Option(help="also λ1 and trace of the loss of each class or client")] = By.whole,
    local: Annotated[
        bool, typer.Option("--local", help="flatness of each client's loss at w and at its own local model")
    ] = False,
    theory: Annotated[bool, typer.Option("--theory", help="MAN's inequalities, layer by layer and by client")] = False,
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="whether a layer's block includes its bias")] = True,
    density: Annotated[int, typer.Option(help="Lanczos steps of density and outliers; 0 = none", min=0)] = 0,
    federated: Annotated[
        bool, typer.Option("--federated", help="spectrum from the clients' products; with --layers, of each client")
    ] = False,
    weights: Annotated[
        WeightsName | None,
        typer.Option(help="weights of the clients for --federated and --local; default those of the run"),
    ] = None,
    parameters: ParametersOption = Parameters.trained,
    seed: Seed = 0,
    picture: Picture = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the flatness of finished runs or checkpoints: Hessian spectrum and trace, sharpness, norms.

    Runs that differ only in method and seed are compared by paired differences. With --density and -o the density of
    the eigenvalues is drawn. The numbers go to RUN/flatness.json too, where `fedflat report` finds them.
    """
    from fedflat import flatness as flat
    from fedflat.errors import RecipeError
    from fedflat.flatness.measure import NAMES
    from fedflat.flatness.spectral import draw_density
    from fedflat.progress import progress
    from fedflat.runs.loading import load_run

    if federated and theory:
        raise RecipeError("--theory compares the clients with the pooled samples; leave --federated out")
    if weights and not (federated or local):
        raise RecipeError("--weights is about the clients' losses: add --federated or --local")
    if picture and not density:
        raise RecipeError("-o draws the spectral density: say by --density with how many Lanczos steps, for example 80")
    if relative_error is not None and not relative_error > 0:
        raise RecipeError(f"--relative-error {relative_error}: it must be a positive number such as 0.05")
    portion, rows, densities = flat.Portion(samples, seed), list[dict[str, Any]](), dict[str, flat.Density]()
    theories, clients = dict[str, flat.Theory](), dict[str, list[flat.Curvature]]()
    groups, localities = dict[str, list[flat.GroupSpectrum]](), dict[str, flat.Locality]()
    recipes: list[Recipe] = []
    for run in checked(runs):
        with progress(f"{run}: measuring"):
            problem = load_run(run, parameters=parameters.value)
            recipes.append(problem.recipe)
            if federated:
                asked = (k, products, density, relative_error)
                found, seen = _by_clients(problem, portion, matrix.value, weights.value if weights else None, *asked)
                if layers:
                    clients[str(run)] = flat.client_curvatures(problem, portion, seed, bias)
                    found["clients"] = [asdict(each) for each in clients[str(run)]]
            else:
                whole = flat.measure(
                    portion.pooled(problem), k, products, rho, adaptive_rho, layers, density, seed, bias,
                    matrix.value, relative_error,
                )  # fmt: skip
                found, seen = whole.record(), whole.spectrum
            if theory:
                theories[str(run)] = flat.theory(problem, portion, seed, bias)
                found["theory"] = _with_sums(theories[str(run)])
            if some := groups_of(problem, portion, by, matrix, products, seed):
                groups[str(run)], found["groups"] = some, [asdict(each) for each in some]
            if local:
                localities[str(run)] = locality_of(problem, portion, rho, weights, seed)
                found["local"] = locality_record(localities[str(run)])
        if seen.density:
            densities[str(run)] = seen.density
        named = {"run": str(run), "method": problem.recipe.method, "seed": problem.recipe.seed}
        named["parameters"] = parameters.value
        rows.append({**named, "classes": problem.federation.dataset.classes, **found})
        if not federated:
            _keep(run, rows[-1])
    compared = differences(rows, recipes)
    if picture:
        draw_density(densities, picture, NAMES[matrix.value])
    if as_json:
        told = {"measured": _measured(rows), "k": k, "bias": bias, "matrix": matrix.value, "runs": rows}
        print_json(told | ({"differences": [asdict(each) for each in compared]} if compared else {}))
        return
    _print_tables(rows, theories, clients, bias)
    print_geometry(groups, localities, compared, matrix)


def _measured(rows: list[dict[str, Any]]) -> str:
    """What was measured, with the number of samples or the range of it over the runs."""
    return MEASURED.format(samples=span_of(rows, "samples"))


def _keep(run: Path, row: dict[str, Any]) -> None:
    """Write what was measured into the run's directory, where the report finds it."""
    from fedflat.files import write_whole, written_to
    from fedflat.runs.folder import beside

    kept = {name: value for name, value in row.items() if name not in ("run", "theory", "clients")}
    place = beside(run, "flatness.json")
    with written_to(place, "make room, then measure again"):
        write_whole(place, json.dumps(plain(kept), indent=2).encode() + b"\n")


def _by_clients(
    problem: "Problem",
    portion: "Portion",
    matrix: "Matrix",
    weights: "Weights | None",
    k: int,
    products: int,
    density: int,
    relative_error: float | None,
) -> tuple[dict[str, Any], "Spectrum"]:
    """Compute the spectrum from products that the clients compute."""
    from fedflat.flatness import FederatedHessian, HessianProduct, spectrum
    from fedflat.rounds.server import first_state
    from fedflat.runs.launch import start_engine

    state = first_state(problem)
    with closing(start_engine(problem, state, HessianProduct(portion, matrix))) as engine:
        operator = FederatedHessian(engine, state, problem, portion, weights, matrix)
        found = spectrum(operator, k, products, 1e-3, density, portion.seed, relative_error)
    return {"samples": operator.samples, "weights": operator.weights, "spectrum": found.record()}, found


def _with_sums(found: "Theory") -> dict[str, Any]:
    """Add the quantities that the inequalities compare to the terms they are made of."""
    return {"clients_sum": found.clients_sum, "blocks_sum": found.pooled.blocks_sum, **asdict(found)}


def _print_tables(
    rows: list[dict[str, Any]], theories: "dict[str, Theory]", clients: "dict[str, list[Curvature]]", bias: bool
) -> None:
    from fedflat.report.flatness_table import flatness_table, layer_table
    from fedflat.report.theory_table import client_table, theory_table

    measured, methods = _measured(rows), [row["method"] for row in rows]
    blocks = f"{measured}; a layer's block is its weight{' and bias' if bias else ' alone'}"
    name = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix", "fisher": "Fisher matrix"}[
        rows[0]["spectrum"]["matrix"]
    ]
    what = f"{name}, sharpness and norms" if "loss" in rows[0] else f"{name}, by products of the clients"
    show(flatness_table(rows, f"{what}: {measured}"))
    for row in rows:
        if row.get("layers"):
            show(layer_table(row))
    if clients:
        show(client_table(clients, methods, blocks))
    if theories:
        show(theory_table(theories, methods, blocks))


@app.command()
def landscape(
    runs: Runs,
    plane: Annotated[
        Plane, typer.Option(help="plane of the top eigenvectors, or of random filter-normalised directions")
    ] = Plane.eigen,
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
    """Compute the loss around the global models of finished runs or checkpoints, on one grid.

    Arrays go to RUN/landscape-PLANE.npz; those of a checkpoint carry its round in their name.
    """
    from fedflat.errors import RecipeError
    from fedflat.flatness import Portion
    from fedflat.flatness import landscape as walk
    from fedflat.progress import progress
    from fedflat.runs.folder import beside
    from fedflat.runs.loading import load_run

    if not 0 < span < math.inf:
        raise RecipeError(f"--span {span}: it must be a positive number")
    found, counts = {}, list[dict[str, Any]]()
    for run in checked(runs):
        problem = load_run(run, parameters=parameters.value)
        objective = Portion(samples, seed).pooled(problem)
        counts.append({"samples": objective.samples})
        with progress(str(run)):
            found[str(run)] = walk(objective, plane.value, span, points, dimensions, seed)
        found[str(run)].save(beside(run, f"landscape-{plane.value}.npz"))
    header = f"{_measured(counts)} on the {plane.value} {'line' if dimensions == 1 else 'plane'}"
    if picture:
        from fedflat.flatness.terrain import draw_landscapes

        draw_landscapes(found, picture)
    if as_json:
        runs_found = [
            {
                "run": name,
                "parameters": parameters.value,
                **count,
                "centre": f.centre,
                "rise": f.rise,
                "axes": f.axes.tolist(),
                "values": f.values.tolist(),
            }
            for (name, f), count in zip(found.items(), counts, strict=True)
        ]
        print_json({"measured": header, "plane": plane.value, "span": span, "runs": runs_found})
        return
    from fedflat.report.flatness_table import landscape_table

    show(landscape_table(found, [count["samples"] for count in counts], header, span))
    if picture:
        out.print(f"drawn to {picture}", markup=False, highlight=False)


def span_of(rows: list[dict[str, Any]], field: str) -> str:
    """A count, or the range of it over the runs."""
    counts = sorted({row[field] for row in rows})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def checked(runs: list[Path]) -> list[Path]:
    """Check that all runs can be read before anything is measured."""
    from fedflat.runs.loading import load_run

    for run in runs:
        load_run(run)
    return runs


def print_json(content: dict[str, Any]) -> None:
    """Print numbers, tensors and arrays as JSON."""
    print(json.dumps(plain(content), indent=2))


def plain(value: Any) -> Any:
    """Convert to JSON types: lists for tensors, null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
