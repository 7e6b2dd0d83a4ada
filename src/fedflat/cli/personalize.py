"""Command to adapt finished runs to each client: personalize."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedflat.cli.app import JsonOption, Spread, TrustOption, app, err, out, show


@app.command(cls=Spread)
def personalize(
    runs: Annotated[list[Path], typer.Argument(help="directories of finished runs")],
    epochs: Annotated[
        list[int] | None, typer.Option(help="test after these epochs: --epochs 1 5; default 1 and 5, for local 200")
    ] = None,
    how: Annotated[
        str, typer.Option(help="finetune, perfedavg (meta steps), knn (kNN-Per), local (local-only training) or none")
    ] = "finetune",
    lr: Annotated[
        float | None, typer.Option(help="learning rate; default that of the last round, for local the recipe's")
    ] = None,
    lr_decay: Annotated[float, typer.Option(help="local: factor on the learning rate after every epoch")] = 0.99,
    size: Annotated[
        int, typer.Option(help="number of test samples of a client, with its own label distribution")
    ] = 1000,
    k: Annotated[int, typer.Option(help="knn: number of neighbours")] = 5,
    mix: Annotated[float, typer.Option(help="knn: weight of the neighbours, 0 to 1")] = 0.5,
    scale: Annotated[float, typer.Option(help="knn: scale of the distances")] = 1.0,
    capacity: Annotated[int, typer.Option(help="knn: number of samples that a client stores")] = 500,
    mix_with: Annotated[
        str, typer.Option(help="knn: what they are mixed with, the model's probabilities (the paper) or its logits")
    ] = "probabilities",
    workers: Annotated[int, typer.Option(help="processes in which clients adapt; 0 = one for each core", min=0)] = 0,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Adapt the global model of finished runs to each client, and test it on samples like the client's own.

    Prints mean ± standard deviation over the clients, and writes each client's numbers to RUN/personal-HOW.jsonl.
    """
    from rich.progress import track

    from fedflat.engine import cores
    from fedflat.runs.build import assemble
    from fedflat.runs.export import standing
    from fedflat.runs.folder import read_model, read_recipe
    from fedflat.runs.loading import last_lr, load_run, on_cpu
    from fedflat.runs.neighbours import Neighbours
    from fedflat.runs.personal import by_name, personalise, save, summary

    neighbours = Neighbours(k, mix, scale, capacity, mix_with)
    for run in runs:
        read_recipe(run)
        if run.suffix != ".json":
            read_model(run)
    rows: list[dict[str, Any]] = []
    for run in runs:
        problem = load_run(run)
        recipe = problem.recipe
        if how == "local":
            problem = assemble(on_cpu(recipe), problem.federation, None, problem.method, problem.task)
        usual = recipe.local.lr if how == "local" else last_lr(recipe, standing(run)["rounds"])
        rate = {"lr": usual if lr is None else lr, "lr_decay": lr_decay}
        watch = partial(track, description=str(run), console=err, transient=True, disable=not err.is_terminal)
        start = problem.network.weights
        settings: dict[str, Any] = {**rate, "size": size, "neighbours": neighbours, "workers": workers or cores()}
        results = personalise(problem, start, epochs, how, **settings, watch=watch)
        file = str(save(run, how, results, recipe.metric))
        facts = {"run": str(run), "method": recipe.method, "metric": recipe.metric, "how": how, "file": file}
        rows += [by_name({**facts, **row}, recipe.metric) for row in summary(results)]
    print(json.dumps(rows, indent=2)) if as_json else _print_personal(rows)


def _print_personal(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from fedflat.runs.result import bare_method

    table = Table(
        title=f"{', '.join({row['metric'] for row in rows})} on the clients' own kind of samples, mean ± std",
        title_justify="left",
    )
    for name in ("run", "method", "how", "epochs", "before", "after"):
        numeric = name in ("epochs", "before", "after")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    for row in rows:
        pairs = [(row[name], row[f"{name}_std"]) for name in ("accuracy_before", "accuracy_after")]
        shown = ("–" if mean is None else f"{mean:.3f} ± {std:.3f}" for mean, std in pairs)
        table.add_row(row["run"], bare_method(row["method"]), row["how"], str(row["epochs"]), *shown)
    show(table)
    for name, left_out in {row["run"]: row["left_out"] for row in rows}.items():
        if left_out:
            out.print(f"{name}: clients left out, for want of test samples: {left_out}", markup=False, highlight=False)
