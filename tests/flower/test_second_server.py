"""A second server for one deployment: refused before it reads or writes a mark of the clients' memory."""

import json
import shutil

import pytest

from fedflat.errors import RunError
from fedflat.recipe import load
from fedflat.runs import RunLock

pytest.importorskip("flwr")
serve = pytest.importorskip("fedflat.flower.service").serve
RECIPE = load(None, ["method=scaffold", "split.clients=2", "server.cohort=2", "server.rounds=2"])
JOURNAL = {"run": "cafe", "sizes": {"0": 5, "1": 7}, "marks": {"0": [[3, "ab"]]}}


class NobodyAsked:
    """A grid that must not be used: whoever is refused does not even look who is connected."""

    def __getattr__(self, name):
        pytest.fail(f"the grid's {name} was used")


@pytest.mark.parametrize("journal", [None, JOURNAL], ids=["before it began", "while it runs"])
def test_it_is_refused_and_the_marks_stay(tmp_path, journal):
    if journal:
        (tmp_path / "deployment.json").write_text(json.dumps(journal))
    with RunLock(tmp_path), pytest.raises(RunError, match="another process is working on this run"):
        serve(NobodyAsked(), RECIPE, tmp_path)
    assert (tmp_path / "deployment.json").exists() == bool(journal)
    if journal:
        assert json.loads((tmp_path / "deployment.json").read_text()) == journal


def test_the_lock_is_free_again_when_a_server_ends_badly(tmp_path):
    class Broken:
        def get_node_ids(self):
            raise RuntimeError("no link")

    with pytest.raises(RuntimeError, match="no link"):
        serve(Broken(), RECIPE, tmp_path / "out")
    with RunLock(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0
    shutil.rmtree(tmp_path / "out")
