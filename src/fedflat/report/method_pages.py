"""Generates the pages of docs/methods from the catalogue and the docstrings of the parts.

python -m fedflat.report.method_pages docs/methods
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedflat.methods import CATALOGUE, explain
from fedflat.report.method_runs import Studied, section, studied


def page(facts: dict[str, Any], runs: Sequence[Studied] = ()) -> str:
    """The page of one method: idea, command, the docstrings of its parts, options, cost and its runs."""
    cost = facts["cost"]
    lines = [
        f"# {facts['name']}",
        "",
        f"{facts['idea'][0].upper()}{facts['idea'][1:]}. {facts['paper']}: *{facts['title']}*.",
        "",
        f"    fedflat run --method {facts['name']}",
        "",
        f'In Python: `fedflat.train(federation, model, "{facts["name"]}")`. Its parts:',
    ]
    for part in facts["parts"]:
        name, _, options = part["part"].partition("(")
        lines += ["", f"## {name}", "", *([f"`{name}({options}`", ""] if options.strip(")") else []), part["text"]]
    if not facts["parts"]:
        lines += ["", "None: this is the plain round, w ← w + mean Δᵢ after local SGD."]
    if facts["options"]:
        lines += ["", "## Options", "", "| option | default | range | meaning |", "|---|---|---|---|"]
        lines += [f"| `{o['name']}` | `{o['default']!r}` | {o['range']} | {o['doc']} |" for o in facts["options"]]
    lines += [
        "",
        "## Cost",
        "",
        "| down | up | kept by a client | kept by the server | gradients per step | extra forward passes |",
        "|---|---|---|---|---|---|",
        "| " + " | ".join(str(cost[key]) for key in ("down", "up", "client", "server", "gradients", "forwards")) + " |",
        "",
        "The first four columns are in model sizes: 1 is one vector with all weights.",
        "",
        *section(facts["name"], runs),
    ]
    return "\n".join(lines)


def index() -> str:
    """The list of all pages."""
    lines = ["# The methods", "", "| method | idea | paper |", "|---|---|---|"]
    lines += [f"| [{name}]({name}.md) | {entry.idea} | {entry.paper} |" for name, entry in CATALOGUE.items()]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """The content of all files, by file name."""
    runs = studied()
    return {"README.md": index(), **{f"{name}.md": page(explain(name), runs) for name in CATALOGUE}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (folder / file).write_text(text, "utf-8")
