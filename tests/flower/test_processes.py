"""A deployment of real processes on loopback: one SuperLink, three SuperNodes, TLS and keys."""

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedflat.prepare import prepare
from fedflat.recipe import load
from fedflat.run import execute

pytest.importorskip("flwr")
write_keys = pytest.importorskip("fedflat.flower.keys").write_keys
pytestmark = pytest.mark.filterwarnings("ignore")
# Less than the 30 s in which Flower may notice a lost node by itself.
CHANGES = ["method=scaffold", "split.clients=3", "server.cohort=2", "server.rounds=3", "admission.deadline=25",
           "engine.name=inline", "engine.group=1"]  # fmt: skip
PATIENCE = 120.0  # seconds, against hanging only
STRANGERS = {
    "unregistered key": "Failed to activate SuperNode",
    "wrong authority": "CERTIFICATE_VERIFY_FAILED",
    "plain connection": "Server disconnected without sending a response",
}


@dataclass
class Story:
    """What became of a deployment: its rounds, and the exit codes and last words of nodes that should not get in."""

    out: Path
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def records(self):
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe():
    return load(None, CHANGES)


@pytest.fixture(scope="module")
def story(loopback, recipe, tmp_path_factory):
    """Three rounds in peace; in the fourth client 2 is killed, and while the server waits for it strangers knock."""
    folder = tmp_path_factory.mktemp("deployment")
    site, told = loopback.Loopback(folder, recipe), Story(folder / "out")
    metrics = told.out / "metrics.jsonl"
    try:
        site.link()
        site.register()
        nodes = [site.node(client) for client in range(3)]
        site.run(told.out, "server.rounds=4")
        loopback.wait(lambda: loopback.lines(metrics) == 3, PATIENCE, "three rounds")
        nodes[2].send_signal(signal.SIGKILL)
        for stranger in STRANGERS:
            told.refused[stranger] = knocks(loopback, site, stranger)
        loopback.wait((told.out / "summary.json").exists, PATIENCE, "the round without client 2")
    finally:
        site.close()
    return told


def knocks(loopback, site, stranger):
    """A SuperNode with one thing wrong: its exit code and what it said."""
    keys, others = site.app / "keys", site.app.parent / stranger
    write_keys(others, ["127.0.0.1"], clients=3)
    key = (others if stranger == "unregistered key" else keys) / "client-2"
    authority = (others if stranger == "wrong authority" else keys) / "ca.pem"
    secure = ["--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
    way = ["--insecure"] if stranger == "plain connection" else secure
    command = ["flower-supernode", "--superlink", site.address, *way, "--port", str(loopback.free_ports(1))]
    process = site.start(*command, "--max-retries", "1")
    return process.wait(PATIENCE), site.log(process).read_text("utf-8", "replace")


def test_it_comes_to_the_simulators_state_to_the_bit(story, recipe, tmp_path):
    execute(*prepare(recipe), tmp_path)
    name = "checkpoints/00000003.server.safetensors"
    assert (story.out / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_round_goes_on_without_a_node_that_was_killed_in_it(story):
    *peaceful, last = story.records
    assert [record["cohort"] for record in peaceful] == [[0, 2], [0, 2], [0, 1]]
    assert last["cohort"] == [0]
    assert [(refusal["client"], refusal["reason"]) for refusal in last["refused"]] == [(2, "hung")]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused(story, stranger):
    code, said = story.refused[stranger]
    assert code == 1 and STRANGERS[stranger] in said
