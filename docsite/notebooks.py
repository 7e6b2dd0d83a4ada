"""Executes a notebook and writes it as a Markdown page with its outputs."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def executed(notebook: Path, workshop: Path, cache: Path) -> Any:
    """Run a notebook in the empty folder `workshop`. An unchanged notebook comes from the cache."""
    source = notebook.read_text("utf-8")
    kept = cache / f"{notebook.stem}-{hashlib.sha256(source.encode()).hexdigest()[:16]}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    read = nbformat.reads(source, as_version=4)
    workshop.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for `!fedflat …`
    place = {"metadata": {"path": str(workshop)}}
    NotebookClient(read, timeout=600, resources=place, extra_arguments=["--log-level=40"]).execute()
    cache.mkdir(parents=True, exist_ok=True)
    nbformat.write(read, kept)
    return read


def page(notebook: Any, pictures: Path) -> str:
    """The Markdown of an executed notebook; its pictures are written to `pictures`, beside the page."""
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source.strip():
            parts.append(f"```python\n{cell.source}\n```")
            parts += [part for index, out in enumerate(cell.outputs) if (part := _output(out, pictures, number, index))]
    return "\n\n".join(parts) + "\n"


def _output(out: Any, pictures: Path, cell: int, index: int) -> str:
    if out.output_type == "stream":
        return "" if out.name == "stderr" else _text(out.text)
    data = out.get("data", {})
    if "image/png" in data:
        pictures.mkdir(parents=True, exist_ok=True)
        name = f"cell-{cell}-{index}.png"
        (pictures / name).write_bytes(base64.b64decode(data["image/png"]))
        return f"![Output of the cell above]({pictures.name}/{name})"
    if "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", data["text/html"])
        return f'<div class="notebook-output">\n{html}\n</div>'
    return _text(data.get("text/plain", ""))


def _text(text: str) -> str:
    shown = "\n".join(line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))
    plain = ESCAPES.sub("", shown).strip("\n")
    return f"```text\n{plain}\n```" if plain else ""


def source_digest(folder: Path) -> str:
    """What the cached outputs depend on besides the notebooks: the package."""
    contents = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(contents).hexdigest()
