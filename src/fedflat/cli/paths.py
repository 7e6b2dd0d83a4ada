"""Commands about several models: path, trajectory, animate; and rescale, about a model and its rescaled copy."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.app import JsonOption, TrustOption, app, out, show
from fedflat.cli.flatness import (
    MEASURED,
    Parameters,
    ParametersOption,
    Picture,
    Plane,
    Runs,
    Samples,
    Seed,
    print_json,
)

if TYPE_CHECKING:  # torch takes seconds to import, and `fedflat --help` must not wait for it
    from torch import Tensor

    from fedflat.flatness import LocalRound, Objective
    from fedflat.flatness import Plane as WeightPlane

ModelArgument = Annotated[str, typer.Argument(help="run directory, or RUN@ROUND for a kept checkpoint")]
Points = Annotated[int, typer.Option(help="points along each direction", min=3)]


class Through(StrEnum):
    """The plane of a trajectory."""

    pca = "pca"
    clients = "clients"


@app.command()
def path(
    a: ModelArgument,
    b: ModelArgument,
    match: Annotated[
        bool, typer.Option("--match", help="also compute it after matching B's hidden units to A's")
    ] = False,
    points: Annotated[int, typer.Option(help="points on the line, the ends included", min=3)] = 25,
    samples: Samples = 1000,
    seed: Seed = 0,
    picture: Picture = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute the loss on the line between two models, on A's training samples, and its barrier.

    A and B may be two runs, two methods, two seeds or two rounds. Two seeds order their hidden units differently:
    --match reorders those of B first, which does not change its function.
    """
    from fedflat.flatness import Portion, interpolate
    from fedflat.progress import progress
    from fedflat.report.path_table import path_table
    from fedflat.runs.kept import located
    from fedflat.runs.loading import load_run

    first, second = (load_run(located(each)) for each in (a, b))
    federation = first.federation
    batches = Portion(samples, seed).batches(federation, range(federation.clients))
    modules, found = (first.network.module, second.network.module), {}
    for matched in (False, True) if match else (False,):
        with progress("matched" if matched else f"{a} → {b}"):
            name = "matched" if matched else "as trained"
            found[name] = interpolate(*modules, batches, first.loss, points, matched, samples=0)
    header = f"{MEASURED.format(samples=found['as trained'].samples)} from {a} to {b}"
    if picture:
        from fedflat.report.route import draw_paths

        draw_paths(found, (a, b), picture)
    if as_json:
        rows = {name: {**vars(each), "barrier": each.barrier, "peak": each.peak} for name, each in found.items()}
        print_json({"measured": header, "paths": rows})
        return
    show(path_table(found, header))
    _drawn(picture)


@app.command()
def trajectory(
    run: Annotated[Path, typer.Argument(help="run directory with the checkpoints of several rounds")],
    plane: Annotated[
        Through, typer.Option(help="principal components of the rounds, or through the received model and two clients")
    ] = Through.pca,
    clients: Annotated[bool, typer.Option("--clients/--no-clients", help="include the clients' local models")] = True,
    points: Points = 25,
    samples: Samples = 1000,
    seed: Seed = 0,
    picture: Picture = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the path of a run through weight space in one plane: rounds, clients' local models, and the loss.

    It uses the checkpoints that the run kept (checkpoint.keep). The clients' models are those of the round after the
    last checkpoint but one, which is computed again. Arrays go to RUN/trajectory.npz.
    """
    from fedflat.errors import RecipeError
    from fedflat.flatness import Portion
    from fedflat.flatness import trajectory as project
    from fedflat.progress import progress
    from fedflat.report.path_table import trajectory_table
    from fedflat.runs.kept import KEEP, kept_checkpoints, kept_models, local_round
    from fedflat.runs.loading import load_run

    kept = kept_checkpoints(run)
    if plane is Through.clients and not clients:
        raise RecipeError("--plane clients needs the clients' models; leave --no-clients out")
    if plane is Through.pca and len(kept) < 3:
        raise RecipeError(f"{run}: {len(kept)} kept models do not span a plane; {KEEP}, or take --plane clients")
    problem = load_run(kept[-1] if kept else run)
    rounds, models = kept_models(run, problem)
    local = None
    if clients:
        with progress(f"{run}: one round of its clients"):
            local = local_round(problem, kept[-2] if len(kept) > 1 else kept[-1])
    objective = Portion(samples, seed).pooled(problem)
    chosen = _plane(plane, models, local)
    with progress(str(run)):
        found = project(objective, models, rounds, chosen, local, points)
    found.save(run / "trajectory.npz")
    header = f"{MEASURED.format(samples=objective.samples)}, models of {run} in the plane of "
    header += "their principal components" if plane is Through.pca else "the received and two clients' models"
    if picture:
        from fedflat.report.route import draw_trajectory

        draw_trajectory(found, picture, str(run))
    if as_json:
        numbers = {name: each for name, each in vars(found).items() if name != "surface"} | vars(found.surface)
        print_json({"measured": header, "run": str(run), "plane": plane.value, **numbers})
        return
    show(trajectory_table(found, header))
    _drawn(picture)


def _plane(plane: Through, models: "Tensor", local: "LocalRound | None") -> "WeightPlane":
    from fedflat.errors import RunError
    from fedflat.flatness import plane_through, principal_plane

    if plane is Through.pca or local is None:
        return principal_plane(models)
    far = sorted(local.models.values(), key=lambda model: -float((model - local.start).norm()))
    if len(far) < 2:
        raise RunError(f"round {local.round} has {len(far)} local models; a plane needs two besides the received one")
    return plane_through(local.start, far[0], far[1])


@app.command()
def animate(
    runs: Runs,
    plane: Annotated[
        Plane, typer.Option(help="plane of the top eigenvectors, or of random filter-normalised directions")
    ] = Plane.eigen,
    span: Annotated[float, typer.Option(help="from −span to span along each direction")] = 1.0,
    points: Points = 15,
    frames: Annotated[int, typer.Option(help="largest number of rounds, evenly spread", min=2)] = 12,
    samples: Samples = 500,
    seed: Seed = 0,
    picture: Annotated[Path | None, typer.Option("-o", "--out", help="file to write (.gif, .mp4)")] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute the loss around the global models over the rounds, as an animation and for the report's slider.

    It uses the checkpoints that each run kept (checkpoint.keep); the directions are those of the last model. Arrays go
    to RUN/landscapes-PLANE.npz.
    """
    from fedflat.flatness import Film, Portion, film
    from fedflat.progress import progress
    from fedflat.report.animation import check_animation, draw_animation
    from fedflat.report.path_table import film_table
    from fedflat.runs.kept import kept_checkpoints, kept_models
    from fedflat.runs.loading import load_run

    if picture:
        check_animation(picture)
    found: dict[str, Film] = {}
    last = {run: load_run((kept_checkpoints(run) or [run])[-1]) for run in runs}
    for run, problem in last.items():
        rounds, models = kept_models(run, problem)
        objective = Portion(samples, seed).pooled(problem)
        with progress(f"{run}: directions"):
            directions = _directions(objective, plane, seed)
        shown = _spread(len(rounds), frames)
        with progress(str(run), len(shown)):
            at = [rounds[k] for k in shown]
            found[str(run)] = film(objective, directions, at, [*models[shown]], span, points)
        found[str(run)].save(run / f"landscapes-{plane.value}.npz")
    header = f"{MEASURED.format(samples=objective.samples)} on the {plane.value} plane of the last model"
    if picture:
        draw_animation(found, picture)
    if as_json:
        rows = [{"run": run, "rounds": each.rounds, "landscapes": [vars(one) for one in each.landscapes]}
                for run, each in found.items()]  # fmt: skip
        print_json({"measured": header, "plane": plane.value, "span": span, "runs": rows})
        return
    show(film_table(found, header))
    _drawn(picture)


def _directions(objective: "Objective", plane: Plane, seed: int) -> "Tensor":
    from fedflat.flatness import Hessian, eigen_plane, filter_normalised, top_eigenvalues

    if plane is Plane.eigen:
        return eigen_plane(top_eigenvalues(Hessian(objective), 2, seed=seed))
    return filter_normalised(objective, 2, seed, orthogonal=True)


def _spread(count: int, most: int) -> list[int]:
    from fedflat.report.lines import thinned

    return thinned(count, most)


@app.command()
def rescale(
    run: Annotated[str, typer.Argument(help="run directory, or RUN@ROUND for a kept checkpoint")],
    factor: Annotated[float, typer.Option(help="factor that multiplies one layer and divides the next")] = 10.0,
    layer: Annotated[str | None, typer.Option(help="the layer to multiply; default the first")] = None,
    samples: Samples = 1000,
    rho: Annotated[float, typer.Option(help="radius of the sharpness of one ascent", min=0)] = 0.05,
    adaptive_rho: Annotated[float, typer.Option(help="radius of the adaptive sharpness", min=0)] = 0.5,
    seed: Seed = 0,
    parameters: ParametersOption = Parameters.trained,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rescale a model without changing its function: λ1 changes, the adaptive sharpness does not.

    A ReLU layer times c and the next one divided by c compute the same outputs.
    """
    from fedflat.flatness import Portion, scale_test
    from fedflat.progress import progress
    from fedflat.report.path_table import scale_table
    from fedflat.runs.kept import located
    from fedflat.runs.loading import load_run

    objective = Portion(samples, seed).pooled(load_run(located(run), parameters=parameters.value))
    with progress(f"{run}: measuring twice"):
        found = scale_test(objective, factor, layer, rho, adaptive_rho, seed)
    header = f"{run}: {MEASURED.format(samples=objective.samples)}"
    if as_json:
        print_json({"measured": header, **asdict(found)})
        return
    show(scale_table(found, header))


def _drawn(picture: Any) -> None:
    if picture:
        out.print(f"drawn to {picture}", markup=False, highlight=False)
