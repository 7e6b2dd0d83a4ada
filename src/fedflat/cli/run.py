"""Commands to train and to inspect recipes: run, resume, split, recipe."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.app import JsonOption, RecipeArgument, SetOption, Spread, TrustOption, app, complain, err, out, show
from fedflat.errors import RecipeError, RunError

if TYPE_CHECKING:
    from fedflat.recipe import Recipe


@app.command(cls=Spread)
def run(
    recipe: RecipeArgument = None,
    method: Annotated[
        list[str] | None, typer.Option(help="method instead of the recipe's; repeat it to compare methods")
    ] = None,
    seeds: Annotated[int, typer.Option(help="number of seeds for each method, from the recipe's seed on", min=1)] = 1,
    set_: SetOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="run directory; default runs/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="print every setting, including defaults")] = False,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a federated model from a recipe."""
    if resume and out_dir is None:
        raise RecipeError("--resume: name the run to continue with --out, or use `fedflat resume DIR`")
    from fedflat.recipe import load

    chosen = [[f"method={json.dumps(name)}"] for name in method or []] or [[]]
    given = [load(recipe, [*(set_ or []), *one]) for one in chosen]
    recipes = [each.model_copy(update={"seed": each.seed + k}) for each in given for k in range(seeds)]

    from fedflat.methods.parser import parse
    from fedflat.runs.folder import refuse_taken

    base = out_dir or _free_directory()
    folders: dict[Path, Recipe] = {}
    for each in recipes:
        parse(each.method)
        name = _slug(str(each.method)) + (f"-seed-{each.seed}" if seeds > 1 else "")
        folder = base if len(recipes) == 1 else base / name
        if folder in folders:
            raise RecipeError(f"--method {each.method}: given twice")
        if not resume:
            refuse_taken(folder)
        folders[folder] = each
    _train(folders, resume, as_json, verbose=verbose)
    if not as_json:
        out.print(f"written to {base}", markup=False, highlight=False)


@app.command(cls=Spread)
def resume(
    directory: Annotated[Path, typer.Argument(help="run directory that `fedflat run` wrote")],
    back_to: Annotated[
        int | None,
        typer.Option("--from", help="go back to the checkpoint of this round; later rounds are discarded"),
    ] = None,
    set_: SetOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue an interrupted run, or make it longer: --set server.rounds=200."""
    from fedflat.recipe import overridden
    from fedflat.runs.folder import read_recipe

    if back_to is not None and is_deployment(directory):
        _go_back(directory, back_to)
        return
    _train({directory: overridden(read_recipe(directory), set_ or [])}, True, as_json, back_to)


def is_deployment(directory: Path) -> bool:
    """Whether a run is a deployment, whose clients are elsewhere."""
    return (directory / "deployment.json").exists()


def _go_back(directory: Path, round: int) -> None:
    """Return a deployment to a kept checkpoint; its server continues from there when it is started again."""
    from fedflat.cli.flower import need_flower

    need_flower()
    from fedflat.flower.journal import Journal
    from fedflat.runs import go_back

    go_back(directory, round, complain, Journal(directory).discard)
    told = f"{directory}: is back at round {round}; continue this deployment with `flwr run`"
    out.print(told, markup=False, highlight=False, soft_wrap=True)


def _train(
    folders: "Mapping[Path, Recipe]", resume: bool, as_json: bool, back_to: int | None = None, verbose: bool = False
) -> None:
    """Train one run after the other, and print a table of all."""
    from fedflat.report.display import RoundProgress, comparison
    from fedflat.runs.build import prepare
    from fedflat.runs.experiment import execute
    from fedflat.runs.result import stopped

    results: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = []
    trained: list[Recipe] = []
    for folder, each in folders.items():
        if is_deployment(folder):
            raise RunError(f"{folder}: its clients are elsewhere; continue this deployment with `flwr run`")
        problem = prepare(each, run=folder if resume else None)
        full = problem.recipe
        trained.append(full)
        if not as_json and not resume and not results:
            told = full.to_toml() if verbose else _in_short(each, full, folder)
            out.print(told, markup=False, highlight=False, soft_wrap=verbose)
        with RoundProgress(str(each.method), full.server.rounds, err if as_json else out, full.metric) as progress:
            result = execute(problem, folder, [progress], resume, complain, back_to=back_to)
        stored = {"bytes_kept": problem.kept, "bytes_checkpoint": _last_checkpoint(folder), "directory": str(folder)}
        results.append((str(each.method), result.history, {**result.summary, **stored}))
        if stopped(full, result.history):
            last, server = result.history[-1], full.server
            told = f"{folder}: finished after round {last['round']} of at most {server.rounds}: "
            told += f"training loss {last['train_loss']:.3g} is below server.stop_loss = {server.stop_loss:g}"
            (err if as_json else out).print(told, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps([summary for _, _, summary in results], indent=2))
    else:
        show(comparison(results, trained[0].evaluation.on, trained[0].metric))


def _last_checkpoint(folder: Path) -> int:
    """The bytes of the files of the last round's checkpoint."""
    files = [file for file in (folder / "checkpoints").glob("[0-9]*.*") if file.is_file()]
    last = max((file.name.partition(".")[0] for file in files), default="")
    return sum(file.stat().st_size for file in files if file.name.partition(".")[0] == last)


def _in_short(recipe: "Recipe", full: "Recipe", folder: Path) -> str:
    """What is trained, which settings are not those of the default recipe, and where all of them are."""
    from fedflat.recipe import load

    split = ", ".join(f"{name} {value}" for name, value in full.split.options().items() if value is not False)
    split = f"{full.split.name} {split}".strip()
    what = f"{full.model.name} on {full.data.name}, {full.split.clients} clients ({split}), "
    what += f"{full.server.rounds} rounds"
    changed = ", ".join(f"{name} = {value}" for name, value in recipe.beside(load()).items())
    changed = f"settings other than the default: {changed}" if changed else "all settings are the default"
    return f"{what}\n{changed}\nevery setting: {folder}/recipe.toml, or --verbose"


def _free_directory() -> Path:
    numbers = (path.name for path in Path("runs").glob("[0-9]*") if path.name.isdigit())
    return Path("runs") / f"{max(map(int, numbers), default=0) + 1:04d}"


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".=" else "-" for c in text).strip("-").replace("---", "-")


@app.command(cls=Spread)
def split(
    recipe: RecipeArgument = None,
    set_: SetOption = None,
    save: Annotated[Path | None, typer.Option(help="write the clients' indices to this .npz file")] = None,
    draw: Annotated[Path | None, typer.Option(help="draw clients × classes to this file (png, pdf, svg)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who holds what: clients × classes of a recipe's split."""
    from fedflat.recipe import load
    from fedflat.report.display import split_table
    from fedflat.report.picture import draw_split
    from fedflat.runs.build import gather

    chosen = load(recipe, set_ or [])
    federation = gather(chosen)
    counts = federation.counts().tolist()
    if as_json:
        print(json.dumps({"clients": federation.clients, "counts": counts}))
    else:
        show(split_table(counts))
    if save:
        federation.save(save)
        err.print(f"saved to {save}", markup=False, highlight=False)
    if draw:
        options = ", ".join(f"{name} {value}" for name, value in chosen.split.options().items())
        draw_split(counts, draw, f"{chosen.data.name}, {chosen.split.name} {options}")
        err.print(f"drawn to {draw}", markup=False, highlight=False)


@app.command(cls=Spread)
def recipe(name: RecipeArgument = None, set_: SetOption = None, trust: TrustOption = False) -> None:
    """Print a recipe with all of its values, defaults included."""
    from fedflat.recipe import load

    chosen = load(name, set_ or [])

    from fedflat.methods.parser import parse, spell

    parse(chosen.method)
    print(chosen.model_copy(update={"method": spell(chosen.method)}).to_toml(), end="")
