"""The notebooks of the documentation run from the first cell to the last. They are kept without outputs."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))
FRESH = "%reset -f\nimport os\nos.chdir({folder!r})\n%reset -f"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One kernel for all notebooks, because most of them take less time than the import of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for `!fedflat …`
        patch.setenv("OMP_NUM_THREADS", "1")
        # CIFAR-10 would take longer than the digits
        patch.setenv("FEDFLAT_DATA", str(tmp_path_factory.mktemp("no data")))
        client = NotebookClient(nbformat.v4.new_notebook(), timeout=300)
        client.execute(cleanup_kc=False)
        yield client
        client._cleanup_kernel()


def test_there_are_seven():
    assert len(TUTORIALS) == 7


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_notebook_runs(path, kernel, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FRESH.format(folder=str(tmp_path))))
    kernel.nb = notebook
    kernel.execute(cleanup_kc=False)
    shown = [kind for cell in notebook.cells for out in cell.get("outputs", ()) for kind in out.get("data", ())]
    assert "text/html" in shown or "text/plain" in shown
    assert "image/png" in shown
