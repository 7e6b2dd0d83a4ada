"""The command that times a method's local step: cost."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import JsonOption, TrustOption, app, out


@app.command()
def cost(
    run: Annotated[Path, typer.Argument(help="directory of a finished run")],
    repeats: Annotated[int, typer.Option(help="number of ratios; their median is reported", min=1)] = 9,
    steps: Annotated[int, typer.Option(help="local steps of a measurement", min=1)] = 6,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time a local step of a run's method in turns with a plain one, in processor time of one thread."""
    from fedflat.runs.loading import load_run
    from fedflat.runs.step_cost import step_cost

    problem = load_run(run)
    found = step_cost(problem, repeats, steps)
    if as_json:
        print(json.dumps({"method": problem.recipe.method, "step_cost": found}))
        return
    out.print(f"{run}: a step of {problem.recipe.method} takes {found:.2f} plain steps", markup=False, highlight=False)
