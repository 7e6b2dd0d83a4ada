"""The command that tunes methods with equal budgets: tune."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import JsonOption, RecipeArgument, SetOption, Spread, TrustOption, app, out
from fedflat.cli.sweep import train_all
from fedflat.errors import TrainingError


@app.command(cls=Spread)
def tune(
    recipe: RecipeArgument = None,
    method: Annotated[
        list[str] | None, typer.Option(help='method to tune, as in "fedsam({rho})"; again for more, else the recipe\'s')
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(help="values to try, local.lr=0.01,0.1 or rho=0.05,0.1, or a TOML file; can be repeated"),
    ] = None,
    trials: Annotated[int, typer.Option(help="largest number of combinations for each method", min=1)] = 9,
    eta: Annotated[int, typer.Option(help="one in how many is promoted to the next stage", min=2)] = 3,
    seeds: Annotated[int, typer.Option(help="number of seeds for each trial", min=1)] = 1,
    final: Annotated[
        int, typer.Option(help="number of seeds in the sweep that is written at the end", min=1, max=10_000)
    ] = 5,
    validation: Annotated[
        float, typer.Option(help="share of the clients' samples to score on", min=0.0, max=1.0)
    ] = 0.1,
    jobs: Annotated[int, typer.Option(help="parallel runs; 0 = what is fastest, within the memory", min=0)] = 0,
    set_: SetOption = None,
    out_dir: Annotated[Path, typer.Option("--out", help="directory of the search")] = Path("tune"),
    optuna: Annotated[str | None, typer.Option(help="also write it to this storage of Optuna")] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tune methods with the same budget, by successive halving on samples held out of the clients' training data.

    Test samples are not used. After an interruption the same command continues. At the end OUT/tuned.toml is a sweep of
    the best settings on seeds that the search has not seen.
    """
    from fedflat.files import write_whole, written_to
    from fedflat.methods.parser import parse, spell
    from fedflat.recipe import load
    from fedflat.runs.tune import Plan, final_sweep, open_storage, read_space, rows, search, to_optuna

    base = load(recipe, set_ or [])
    searched = read_space(method or [], space or [], spell(base.method))
    plan = Plan(base, searched, base.server.rounds, trials, eta, seeds, validation)
    for name in plan.space.methods:
        for settings in plan.space.drawn(name, trials):
            parse(plan.point(name, settings, 0, 1).recipe.method)
    if optuna:
        open_storage(optuna)
    failed: dict[str, str] = {}

    found = search(plan, out_dir, lambda sweep, folder: failed.update(train_all(sweep, folder, jobs, trust)))
    with written_to(out_dir, "choose another --out"):
        write_whole(out_dir / "tuned.toml", final_sweep(plan, found, final).encode())
    if optuna:
        to_optuna(plan, found, optuna, out_dir.name)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2, ensure_ascii=False))
    else:
        from fedflat.report.verdicts import plain_table

        out.print(plain_table(rows(found), "tuned with equal budgets, on validation samples"))
        told = f"train the final runs with: fedflat sweep {out_dir / 'tuned.toml'}"
        out.print(told, markup=False, highlight=False, soft_wrap=True)
    if failed and all(each.best is None for each in found):
        raise TrainingError(f"all trials failed, such as {next(iter(failed))}: {next(iter(failed.values()))}")
