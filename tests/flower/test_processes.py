"""A deployment of real processes on loopback: one SuperLink, three SuperNodes, TLS and keys."""

import json
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

pytest.importorskip("flwr")
write_keys = pytest.importorskip("fedflat.flower.keys").write_keys
pytestmark = pytest.mark.filterwarnings("ignore")
# Less than the 30 s in which Flower may notice a lost node by itself.
CHANGES = ["method=scaffold", "split.clients=3", "server.cohort=2", "server.rounds=2", "admission.deadline=25",
           "engine.name=inline", "engine.group=1", "deployment.draws=recipe"]  # fmt: skip
PATIENCE = 240.0  # seconds, against hanging only
# What each stranger says of its refusal. A plain connection is cut off at different points, so its words vary.
STRANGERS = {
    "unregistered key": "Failed to activate SuperNode",
    "wrong authority": "CERTIFICATE_VERIFY_FAILED",
    "plain connection": "Server disconnected|Connection reset|Broken pipe|Connection aborted",
}
SLY = """
from pathlib import Path
Path({mark!r}).touch()
from flwr.clientapp import ClientApp
app = ClientApp()
"""


@dataclass
class Story:
    """What became of a deployment: its rounds, and the exit codes and last words of nodes that should not get in."""

    out: Path
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    said: str = ""

    @property
    def records(self):
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe():
    return load(None, CHANGES)


@pytest.fixture(scope="module")
def story(loopback, recipe, tmp_path_factory):
    """Two rounds, with an impostor beside the clients; in the third client 1 is killed, and strangers knock.

    Then another server's app comes, whose code for clients is not theirs.
    """
    folder = tmp_path_factory.mktemp("deployment")
    site, told = loopback.Loopback(folder, recipe), Story(folder / "out")
    metrics = told.out / "metrics.jsonl"
    try:
        site.link()
        site.register()
        impostor(loopback, site)
        nodes = [site.node(client) for client in range(3)]
        run = site.run(told.out, "server.rounds=3")
        loopback.wait(lambda: loopback.lines(metrics) == 2, PATIENCE, "two rounds")
        nodes[1].send_signal(signal.SIGKILL)
        for stranger in STRANGERS:
            told.refused[stranger] = knocks(loopback, site, stranger)
        loopback.wait((told.out / "summary.json").exists, PATIENCE, "the round without client 1")
        told.said = site.said(run)
        submit_other_code(site, folder)
        loopback.wait((folder / "sly" / "out" / "summary.json").exists, PATIENCE, "the round of another's app")
    finally:
        site.close()
    return told


def impostor(loopback, site):
    """A registered node, with a key of its own, that says it is client 0; it is there before the clients are."""
    write_keys(site.app.parent / "impostor", ["127.0.0.1"], clients=1)
    key = str(site.app.parent / "impostor" / "client-0")
    site.flwr("supernode", "register", f"{key}.pub", "deployment")
    way = ["--root-certificates", "keys/ca.pem", "--auth-supernode-private-key", key]
    port = str(loopback.free_ports(1))
    site.start("sh", "-c", '. ./environment.sh && exec flower-supernode "$@"', "flower-supernode", "--superlink",
               site.address, *way, "--port", port, "--node-config", "client=0")  # fmt: skip
    loopback.wait(lambda: online(site), PATIENCE, "the impostor")


def online(site):
    return [node for node in site.flwr("supernode", "list", "deployment")["nodes"] if node["status"] == "online"]


def submit_other_code(site, folder):
    """An app of the same name whose client's side leaves a mark where it is loaded, submitted by the server."""
    sly = folder / "sly" / "wards"
    shutil.copytree(site.app, sly, ignore=shutil.ignore_patterns("keys", "memory", "flwr", "run"))
    (sly / "wards" / "client.py").write_text(SLY.format(mark=str(folder / "mark")))
    changes = "server.rounds=1 server.cohort=3 deployment.nodes=2"
    site.flwr("run", str(sly), "deployment", "-c", f'out="{folder}/sly/out" set="{changes}"')


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
    execute(prepare(recipe), tmp_path)
    name = "checkpoints/00000002.server.safetensors"
    deployed, simulated = (
        {k: v.numpy().tobytes() for k, v in load_file(d / name).items()} for d in (story.out, tmp_path)
    )
    beside = deployed.keys() - simulated.keys()  # norms that only a deployment compares
    assert all(key.startswith("state.gate.norms.") for key in beside)
    assert {key: value for key, value in deployed.items() if key not in beside} == simulated


def test_a_round_goes_on_without_a_node_that_was_killed_in_it(story):
    *peaceful, last = story.records
    assert [record["cohort"] for record in peaceful] == [[0, 2], [0, 2]]
    assert last["cohort"] == [0]
    assert [(refusal["client"], refusal["reason"]) for refusal in last["refused"]] == [(1, "hung")]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused(story, stranger):
    code, said = story.refused[stranger]
    assert code == 1, said
    assert re.search(STRANGERS[stranger], said), said


def test_a_registered_node_is_not_believed_to_be_another_client(story):
    assert "does not belong to a client" in story.said
    assert not [refusal for record in story.records[:2] for refusal in record.get("refused", ())]


def test_clients_run_their_own_code_and_not_the_servers(story):
    sly = story.out.parent / "sly" / "out" / "metrics.jsonl"
    (record,) = map(json.loads, sly.read_text().splitlines())
    assert record["cohort"] == [0, 2]
    assert not (story.out.parent / "mark").exists()
