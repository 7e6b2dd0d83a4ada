"""The notebooks of the documentation run from the first cell to the last. They are kept without outputs."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))


def test_there_are_seven():
    assert len(TUTORIALS) == 7


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for `!fedflat …`
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "no data"))  # CIFAR-10 would take longer than the digits
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [kind for cell in notebook.cells for out in cell.get("outputs", ()) for kind in out.get("data", ())]
    assert "text/html" in shown or "text/plain" in shown
    assert "image/png" in shown
