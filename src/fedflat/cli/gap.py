"""The command `fedflat duality`: which directions of a layer carry the generalisation gap."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.app import JsonOption, TrustOption, app, out, show
from fedflat.cli.flatness import Parameters, ParametersOption, Picture, Runs, Seed, checked, print_json, span_of
from fedflat.errors import RunError

if TYPE_CHECKING:  # torch takes seconds to import, and `fedflat --help` must not wait for it
    from fedflat.federation.population import Federation
    from fedflat.flatness import Duality
    from fedflat.local.rule import Batch


@app.command()
def duality(
    runs: Runs,
    layer: Annotated[
        list[str] | None, typer.Option(help="name of a layer, can be repeated; default every linear layer")
    ] = None,
    k: Annotated[int, typer.Option(help="number of directions if a layer is too large for a full basis", min=1)] = 50,
    pairs: Annotated[int, typer.Option(help="largest number of pairs in each pairing; 0 = all", min=0)] = 1000,
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
    """Show which directions of a layer carry the generalisation gap of finished runs (activity–weight duality).

    Shows the gap between test and training loss beside both pairings: each training sample with its nearest test
    sample of the same class (the paper's), and each test sample with its nearest training sample (the authors' demo).
    """
    from torch import nn

    from fedflat.flatness import decompose as analyse
    from fedflat.flatness import layers_of
    from fedflat.progress import progress
    from fedflat.runs.loading import load_run

    rows, results = list[dict[str, Any]](), {}
    for run in checked(runs):
        problem = load_run(run, parameters=parameters.value)
        module = problem.network.module
        train, test = _halves(problem.federation, samples, test_samples, seed)
        names = layer or [n for n in layers_of(module) if isinstance(module.get_submodule(n), nn.Linear)]
        if not names:
            raise RunError(f"{run}: no linear layer of it was trained in full; merge its adapters by --parameters all")
        for name in names:
            with progress(f"{run}: {name}"):
                result = analyse(module, problem.loss, train, test, name, k, pairs, samples=0, seed=seed)
            results[f"{run} {name}"] = result
            named = {"run": str(run), "method": problem.recipe.method, "parameters": parameters.value}
            rows.append({**named, **_duality_row(result)})
    used, tested = span_of(rows, "train_samples"), span_of(rows, "test_samples")
    header = (
        f"generalisation gap of {used} training and {tested} test samples beside that of their pairs, "
        "in the eigenbasis of each layer's Hessian"
    )
    if picture:
        from fedflat.flatness import draw_duality

        draw_duality(results, picture)
    if as_json:
        print_json({"measured": header, "layers": rows})
        return
    from fedflat.report.flatness_table import duality_table

    show(duality_table(results, header))
    if picture:
        out.print(f"drawn to {picture}", markup=False, highlight=False)


def _halves(federation: "Federation", samples: int, test_samples: int, seed: int) -> "tuple[Batch, Batch]":
    """Training samples of all clients, and test samples; 0 means all."""
    import torch

    from fedflat.flatness import Portion
    from fedflat.flatness.pairing import drawn
    from fedflat.tokens import joined

    train = joined(Portion(samples, seed).batches(federation, range(federation.clients)))
    test = federation.held_out("test", 0, federation.size("test"))
    some = drawn(torch.arange(len(test[1])), test_samples, seed)
    return train, (test[0][some], test[1][some])


def _duality_row(result: "Duality") -> dict[str, Any]:
    """All numbers of a layer, including derived ones."""
    named = ("remainder", "fluctuation", "drift", "envelope", "size", "sharpness", "participation")
    pairings = {
        direction: asdict(found)
        | {name: getattr(found, name) for name in named}
        | {"correlations": asdict(found.correlations)}
        for direction, found in result.pairings.items()
    }
    return {**asdict(result), "gap": result.gap, "pairings": pairings}
