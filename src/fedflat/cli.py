"""The command line. Imports of torch wait until a command needs it, so that help and mistakes answer at once."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedflat.errors import FedflatError

app = typer.Typer(help="Flatness-aware federated learning.", no_args_is_help=True, add_completion=False)
data_app = typer.Typer(help="Data sets: list, get, show.", no_args_is_help=True)
app.add_typer(data_app, name="data")
out, err = Console(), Console(stderr=True)

RecipeArgument = Annotated[
    str | None, typer.Argument(help="recipe file (TOML) or preset: smoo, sol, man; else the default")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="override a field: --set local.lr=0.05")]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output")]
DirOption = Annotated[
    Path | None, typer.Option("--dir", help="data directory; else $FEDFLAT_DATA, else the cache folder")
]


def main() -> None:
    """The entry point: a user's mistake becomes one sentence and an exit code, never a traceback."""
    try:
        sys.exit(app(standalone_mode=False))
    except FedflatError as error:
        fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    except Exception as error:
        if hasattr(error, "format_message"):
            fail(error.format_message(), 2)
        raise


def fail(message: str, code: int) -> None:
    err.print(f"fedflat: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


@app.command()
def run(
    recipe: RecipeArgument = None,
    method: Annotated[
        list[str] | None, typer.Option(help="method in place of the recipe's; again for a comparison")
    ] = None,
    set_: SetOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="run directory; default runs/NAME")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a federated model from a recipe."""
    from fedflat.methods import spell
    from fedflat.recipe import load
    from fedflat.report.display import RoundProgress, comparison
    from fedflat.run import execute, prepare

    chosen = [[f"method={json.dumps(name)}"] for name in method or []] or [[]]
    recipes = [load(recipe, [*(set_ or []), *one]) for one in chosen]
    for each in recipes:
        spell(each.method)
    base = out_dir or _free_directory()
    results: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = []
    for each in recipes:
        problem, full = prepare(each)
        folder = base if len(recipes) == 1 else base / _slug(str(each.method))
        if not as_json and not results:
            out.print(full.to_toml(), markup=False, highlight=False)
        with RoundProgress(str(each.method), full.server.rounds, err if as_json else out) as progress:
            result = execute(problem, full, folder, [progress])
        results.append((str(each.method), result.history, {**result.summary, "directory": str(folder)}))
    if as_json:
        print(json.dumps([summary for _, _, summary in results], indent=2))
    else:
        out.print(comparison(results))
        out.print(f"written to {base}", markup=False, highlight=False)


def _free_directory() -> Path:
    numbers = (path.name for path in Path("runs").glob("[0-9]*") if path.name.isdigit())
    return Path("runs") / f"{max(map(int, numbers), default=0) + 1:04d}"


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".=" else "-" for c in text).strip("-").replace("---", "-")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="one method in full")] = None, as_json: JsonOption = False
) -> None:
    """List the methods, or show one with its equations and options."""
    from rich.table import Table

    from fedflat.catalogue import CATALOGUE
    from fedflat.methods import explain

    if name is not None:
        facts = explain(name)
        print(json.dumps(facts, indent=2)) if as_json else _print_method(facts)
        return
    everything = [explain(entry) for entry in CATALOGUE]
    if as_json:
        print(json.dumps(everything, indent=2))
        return
    table = Table(
        "method", "idea", "paper", "down/up", "kept", "passes", title="cost in model sizes, and passes a step"
    )
    for facts in everything:
        cost = facts["cost"]
        passes = f"{cost['gradients']}{f' + {forwards} fwd' if (forwards := cost['forwards']) else ''}"
        table.add_row(
            facts["name"], facts["idea"], facts["paper"], f"{cost['down']}/{cost['up']}", str(cost["client"]), passes
        )
    out.print(table)


def _print_method(facts: dict[str, Any]) -> None:
    cost = facts["cost"]
    out.print(f"[bold]{facts['name']}[/]  {facts['idea']} ({facts['paper']})\n")
    for part in facts["parts"]:
        out.print(f"{part['part']}\n", markup=False, style="bold", highlight=False)
        out.print(part["text"] + "\n", markup=False, highlight=False)
    out.print("options" if facts["options"] else "no options", style="bold")
    for option in facts["options"]:
        out.print(f"  {option['name']} = {option['default']}   {option['doc']}; {option['range']}", markup=False)
    out.print("cost", style="bold")
    out.print(
        f"  {cost['down']} model sizes down, {cost['up']} up, {cost['client']} kept by a client, {cost['server']} by "
        f"the server; {cost['gradients']} gradients a step, {cost['forwards']} further forward passes"
    )


@app.command()
def split(
    recipe: RecipeArgument = None,
    set_: SetOption = None,
    save: Annotated[Path | None, typer.Option(help="write the clients' indices to this .npz file")] = None,
    draw: Annotated[Path | None, typer.Option(help="draw clients × classes into this file (png, pdf, svg)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who holds what: clients × classes of a recipe's split."""
    from fedflat.federation import partition
    from fedflat.recipe import load
    from fedflat.report.display import split_table
    from fedflat.report.picture import draw_split
    from fedflat.run import gather

    chosen = load(recipe, set_ or [])
    federation = gather(chosen)
    counts = federation.counts().tolist()
    if as_json:
        print(json.dumps({"clients": federation.clients, "counts": counts}))
    else:
        out.print(split_table(counts))
    if save:
        partition.save(save, [shard.numpy() for shard in federation.shards])
        err.print(f"saved to {save}", markup=False, highlight=False)
    if draw:
        draw_split(counts, draw, f"{chosen.data.name}, {chosen.split.name}")
        err.print(f"drawn to {draw}", markup=False, highlight=False)


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="recorded trajectories (.npz)")], as_json: JsonOption = False
) -> None:
    """Replay recorded runs of the methods' authors and compare the weights after every round."""
    from rich.table import Table

    from fedflat.verify import verify as replay

    verdicts, broken = [], []
    for path in files:
        try:
            verdicts.append(replay(path))
        except FedflatError as error:
            broken.append(str(error))
    if as_json:
        rows = [{**asdict(verdict), "path": str(verdict.path), "good": verdict.good} for verdict in verdicts]
        print(json.dumps(rows, indent=2))
    else:
        table = Table("file", "method", "rounds", "largest deviation", "tolerance", "")
        for v in verdicts:
            mark = "[green]holds[/]" if v.good else "[red]deviates[/]"
            table.add_row(v.path.name, v.method, str(v.rounds), f"{v.deviation:.2e}", f"{v.tolerance:.0e}", mark)
        out.print(table)
    for message in broken:
        err.print(f"fedflat: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    if broken or not all(v.good for v in verdicts):
        raise typer.Exit(1)


@app.command()
def recipe(name: RecipeArgument = None, set_: SetOption = None) -> None:
    """Print a recipe with every value in force."""
    from fedflat.recipe import load

    print(load(name, set_ or []).to_toml(), end="")


@data_app.command("list")
def data_list(directory: DirOption = None, as_json: JsonOption = False) -> None:
    """Which data sets there are, and which are in place."""
    from rich.table import Table

    from fedflat.federation.datasets import DATASETS, data_directory, whereabouts

    places = {name: whereabouts(name, directory) for name in DATASETS}
    if as_json:
        print(json.dumps(places))
        return
    table = Table("data set", "where", title=f"data directory: {data_directory(directory)}", title_justify="left")
    for name, place in places.items():
        table.add_row(name, place or f"not here: fedflat data get {name}")
    out.print(table)


@data_app.command("get")
def data_get(name: str, directory: DirOption = None) -> None:
    """Download a data set from its official address."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fedflat.federation.download import get

    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=out
    ) as bar:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done)

        folder = get(name, directory, show)
    out.print(f"{name} is in {folder}", markup=False, highlight=False)


@data_app.command("show")
def data_show(name: str, directory: DirOption = None, as_json: JsonOption = False) -> None:
    """What a data set holds."""
    from fedflat.federation.datasets import load

    data = load(name, directory)
    facts = {
        "name": data.name,
        "classes": data.classes,
        "shape": list(data.shape),
        "train": len(data.train.labels),
        "test": len(data.test.labels),
        "train_per_class": data.train.labels.bincount(minlength=data.classes).tolist(),
        "mean": list(data.mean),
        "std": list(data.std),
        "groups": None if data.train.groups is None else int(data.train.groups.unique().numel()),
    }
    if as_json:
        print(json.dumps(facts))
        return
    for key, value in facts.items():
        out.print(f"{key:16} {value}", markup=False, highlight=False)


class Spread(typer.core.TyperCommand):
    """A command in which `--epochs 1 5` means `--epochs 1 --epochs 5`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread, counting = list[str](), False
        for argument in args:
            counting = argument == "--epochs" or (counting and argument.isdigit())
            again = counting and spread[-1:] != ["--epochs"] and argument != "--epochs"
            spread += ["--epochs", argument] if again else [argument]
        return super().parse_args(ctx, spread)


@app.command(cls=Spread)
def personalize(
    runs: Annotated[list[Path], typer.Argument(help="directories of finished runs")],
    epochs: Annotated[
        list[int] | None, typer.Option(help="epochs to test after: --epochs 1 5; else 1 and 5, local 200")
    ] = None,
    how: Annotated[str, typer.Option(help="finetune, knn (kNN-Per), local (local-only training) or none")] = "finetune",
    size: Annotated[int, typer.Option(help="test samples of a client, by the labels of its own")] = 1000,
    k: Annotated[int, typer.Option(help="knn: how many neighbours answer")] = 5,
    mix: Annotated[float, typer.Option(help="knn: their share of the answer, 0 to 1")] = 0.5,
    scale: Annotated[float, typer.Option(help="knn: how far they are heard")] = 1.0,
    capacity: Annotated[int, typer.Option(help="knn: how many samples a client stores")] = 500,
    as_json: JsonOption = False,
) -> None:
    """Adapt the global model of finished runs to each client, and test it on samples like the client's own.

    Prints mean ± standard deviation over the clients, and writes each client's numbers to RUN/personal-HOW.jsonl.
    """
    from functools import partial

    from rich.progress import track
    from rich.table import Table

    from fedflat.personal import Neighbours, last_lr, load_run, personalise, read_run, save, summary
    from fedflat.run import assemble

    neighbours = Neighbours(k, mix, scale, capacity)
    for run in runs:
        read_run(run)
    rows: list[dict[str, Any]] = []
    for run in runs:
        problem, recipe = load_run(run)
        if how == "local":
            problem = assemble(recipe, problem.federation, None, problem.method, problem.loss)
        lr = recipe.local.lr if how == "local" else last_lr(recipe)
        watch = partial(track, description=str(run), console=err, transient=True, disable=not err.is_terminal)
        start = problem.network.weights
        results = personalise(problem, start, epochs, how, lr=lr, size=size, neighbours=neighbours, watch=watch)
        file = str(save(run, how, results))
        facts = {"run": str(run), "method": recipe.method, "how": how, "file": file}
        rows += [{**facts, **row} for row in summary(results)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="accuracy on the clients' own kind of samples, mean ± std", title_justify="left")
    for name in ("run", "method", "how"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in ("epochs", "before", "after"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        pairs = [(row[name], row[f"{name}_std"]) for name in ("accuracy_before", "accuracy_after")]
        shown = ("–" if mean is None else f"{mean:.3f} ± {std:.3f}" for mean, std in pairs)
        table.add_row(row["run"], row["method"], how, str(row["epochs"]), *shown)
    out.print(table)
    for name, left_out in {row["run"]: row["left_out"] for row in rows}.items():
        if left_out:
            out.print(f"{name}: clients left out, for want of test samples: {left_out}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
