"""Commands for data sets: list, get, show."""

import json
from typing import Any

import typer

from fedflat.cli.app import DirOption, Group, JsonOption, app, out, show
from fedflat.errors import DataError

data_app = typer.Typer(cls=Group, help="Data sets: list, get, show.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(directory: DirOption = None, as_json: JsonOption = False) -> None:
    """Which data sets there are, and which are in place."""
    from rich.table import Table

    from fedflat.federation.datasets import known_datasets, whereabouts
    from fedflat.federation.places import data_directory

    places, faults = dict[str, str | None](), dict[str, str]()
    for name in known_datasets():
        places[name] = None
        try:
            places[name] = whereabouts(name, directory)
        except DataError as error:
            faults[name] = str(error)
    if as_json:
        print(json.dumps(places))
        return
    table = Table("data set", "where", title=f"data directory: {data_directory(directory)}", title_justify="left")
    for name, place in places.items():
        table.add_row(name, place or faults.get(name, f"not here: fedflat data get {name}"))
    show(table)


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
        "train_per_class": data.class_counts(),
        "task": data.task,
        "vocabulary": data.vocabulary or None,
        "mean": list(data.mean),
        "std": list(data.std),
        "groups": None if data.train.groups is None else int(data.train.groups.unique().numel()),
    }
    if as_json:
        print(json.dumps(facts))
        return
    for key, value in facts.items():
        out.print(f"{key:16} {value}", markup=False, highlight=False)
