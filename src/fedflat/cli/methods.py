"""Commands that list and verify methods: methods, verify."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedflat.cli.app import JsonOption, TrustOption, app, complain, out, show
from fedflat.errors import FedflatError


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="show this method in detail")] = None, as_json: JsonOption = False
) -> None:
    """List the methods, or show one with its equations and options."""
    from rich.table import Table

    from fedflat.methods.catalogue import CATALOGUE
    from fedflat.methods.parser import explain

    if name is not None:
        facts = explain(name)
        print(json.dumps(facts, indent=2)) if as_json else _print_method(facts)
        return
    everything = [explain(entry) for entry in CATALOGUE]
    if as_json:
        print(json.dumps(everything, indent=2))
        return
    table = Table(
        "method", "idea", "paper", "down/up", "kept", "passes", title="cost in model sizes, and passes per step"
    )
    for facts in everything:
        cost = facts["cost"]
        passes = f"{cost['gradients']}{f' + {forwards} fwd' if (forwards := cost['forwards']) else ''}"
        table.add_row(
            facts["name"], facts["idea"], facts["paper"], f"{cost['down']}/{cost['up']}", str(cost["client"]), passes
        )
    show(table)


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
        f"the server; {cost['gradients']} gradients per step, {cost['forwards']} extra forward passes"
    )


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="recorded trajectories (.npz)")],
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replay recorded runs of the methods' authors, compare every recorded array and name those that deviate."""
    from rich.table import Table

    from fedflat.runs.verify import verify as replay

    verdicts, broken = [], []
    for path in files:
        try:
            verdicts.append(replay(path))
        except FedflatError as error:
            broken.append(str(error))
    if as_json:
        facts = ("deviation", "deviating", "good")
        rows = [{**asdict(v), "path": str(v.path), **{name: getattr(v, name) for name in facts}} for v in verdicts]
        print(json.dumps(rows, indent=2))
    else:
        table = Table("file", "method", "rounds", "largest deviation", "tolerance", "")
        for v in verdicts:
            mark = "[green]holds[/]" if v.good else "[red]deviates[/]"
            table.add_row(v.path.name, v.method, str(v.rounds), f"{v.deviation:.2e}", f"{v.tolerance:.0e}", mark)
        show(table)
        for v in verdicts:
            if not v.good:
                names = ", ".join(f"{name} ({v.deviations[name]:.2e})" for name in v.deviating)
                out.print(f"{v.path} deviates in {names}", markup=False, highlight=False, soft_wrap=True)
    for message in broken:
        complain(message)
    if broken or not all(v.good for v in verdicts):
        raise typer.Exit(1)
