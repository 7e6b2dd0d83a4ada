"""A client's own copy of the app in the place of what a server sends."""

import sys

import pytest

from fedflat.recipe import load

pytest.importorskip("flwr")
own_code = pytest.importorskip("fedflat.flower.own_code")
write_app = pytest.importorskip("fedflat.flower.project").write_app
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def flower(monkeypatch):
    """Flower's module that runs a ClientApp, as it was before and will be again."""
    module = pytest.importorskip(own_code.FLOWER)
    for name in own_code.REPLACED:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module


def test_the_app_in_the_folder_is_loaded_and_what_was_sent_stays_packed(tmp_path, flower, monkeypatch):
    write_app(tmp_path / "clinic", load(None, ["split.clients=3", "server.cohort=2"]))
    started = []
    monkeypatch.setattr("flwr.supernode.cli.flwr_clientapp", lambda: started.append(sys.argv))
    own_code.main([str(tmp_path / "clinic"), "--token", "t"])
    assert started == [["flwr-clientapp", "--token", "t"]]
    assert flower.install_from_fab(b"whatever the server sent", skip_prompt=True) is None
    load_app = flower.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert load_app("local/other", "9.9.9", "0" * 64) is sys.modules["clinic.client"].app


def test_a_flower_in_which_that_cannot_be_done_is_not_started(tmp_path, flower, monkeypatch):
    monkeypatch.delattr(flower, "install_from_fab")
    monkeypatch.setattr("flwr.supernode.cli.flwr_clientapp", lambda: pytest.fail("it was started"))
    with pytest.raises(SystemExit, match="this version of Flower has no install_from_fab"):
        own_code.main([str(tmp_path)])
