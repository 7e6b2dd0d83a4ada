"""Nodes that are missing, strange or forgetful."""

import re

import pytest

from fedflat import trust
from fedflat.engine.inline import Inline
from fedflat.errors import DataError, RecipeError, TrainingError
from fedflat.rounds.interface import one_thread

flwr = pytest.importorskip("flwr.app")
pytestmark = pytest.mark.filterwarnings("ignore")


def only(grid, *clients):
    """A grid to which only these clients are connected."""

    class Some(grid):
        def get_node_ids(self):
            return [100 + client for client in clients]

    return Some


def test_too_few_nodes_are_one_sentence_that_names_the_missing(deployed, loopback, small):
    sentence = (
        r"^only 2 of 4 clients are connected after 0.3 s \(missing: 1, 3\); "
        r"start their nodes, or lower deployment.nodes$"
    )
    with pytest.raises(TrainingError, match=sentence):
        deployed(small("deployment.wait=0.3"), only(loopback.InProcess, 0, 2))


def test_fewer_nodes_are_enough_if_the_recipe_says_so(deployed, loopback, small):
    _, records = deployed(small("deployment.nodes=2"), only(loopback.InProcess, 0, 2))
    assert {client for record in records for client in record["cohort"]} == {0, 2}
    assert {r["reason"] for record in records for r in record["refused"]} == {"absent"}


def test_a_round_waits_until_its_quorum_is_connected(deployed, loopback, small, simulated):
    class Restarted(loopback.InProcess):
        """After it has listed its nodes twice, it knows none for a while."""

        def get_node_ids(self):
            self.asked = getattr(self, "asked", 0) + 1
            return [] if 3 <= self.asked <= 5 else super().get_node_ids()

    assert deployed(small(), Restarted) == simulated(small())


def test_nodes_that_are_no_client_are_named_and_left_alone(deployed, loopback, capsys, small, simulated):
    class Crowded(loopback.InProcess):
        def __init__(self, app, clients, **config):
            super().__init__(app, clients, **config)
            for node, number in (7, "three"), (8, 4):
                self.contexts[node] = replace_config(self.contexts[100], client=number)

    assert deployed(small(), Crowded) == simulated(small())
    named = [line for line in capsys.readouterr().out.splitlines() if " is not one of the 4 clients: " in line]
    assert sorted(line.partition(":")[0] for line in named) == [f"node {n} is not one of the 4 clients" for n in (7, 8)]
    assert any("client = 'three' must be a whole number from 0 on" in line for line in named)


def replace_config(context, **config):
    """A new node that says the same of itself but for this."""
    return flwr.Context(1, 1, {**context.node_config, **config}, flwr.RecordDict(), run_config={})


def test_where_two_nodes_claim_one_client_the_first_stays(deployed, loopback, small, simulated):
    asked = []

    class Doubled(loopback.InProcess):
        def __init__(self, app, clients, **config):
            super().__init__(app, clients, **config)
            self.contexts[200] = replace_config(self.contexts[100])

        def answers(self, message):
            asked.append((message.metadata.dst_node_id, message.metadata.message_type))
            return super().answers(message)

    assert deployed(small(), Doubled) == simulated(small())
    assert (200, "query") in asked and (200, "train") not in asked


def test_sharpness_needs_every_client(deployed, loopback, small):
    measured = small("deployment.nodes=3", "evaluation.sharpness=1")
    with pytest.raises(DataError, match="client 3 was not connected at the start"):
        deployed(measured, only(loopback.InProcess, 0, 1, 2))


def test_a_deployment_must_know_its_clients(deployed, small):
    with pytest.raises(RecipeError, match=r"^split.clients"):
        deployed(small("split=natural", "split.clients=0"))


def test_a_deployment_cannot_stop_by_a_training_loss_that_its_server_does_not_see(deployed, small):
    with pytest.raises(RecipeError, match=r"^server.stop_loss: the server of a deployment has no training samples"):
        deployed(small("server.stop_loss=0.1"))


# --------------------------------------------------------------------------------------------------------------------
# Memory that is lost
# --------------------------------------------------------------------------------------------------------------------

LAST, FORGETFUL = 4, 2
KEEPING = ["method=scaffold", f"server.rounds={LAST + 1}", "server.cohort=4"]


def gone(folder, older):
    for file in folder.iterdir():
        file.unlink()


def from_a_backup(folder, older):
    gone(folder, older)
    (folder / "00000000.safetensors").write_bytes(older)


def under_the_new_name(folder, older):
    max(folder.iterdir()).write_bytes(older)


def damaged(folder, older):
    newest = max(folder.iterdir())
    *rest, last = newest.read_bytes()
    newest.write_bytes(bytes([*rest, last ^ 1]))


LOSSES = {gone: "missing", from_a_backup: "missing", under_the_new_name: "not the one", damaged: "not the one"}


class Forgetful(Inline):
    """The simulator with a client that has forgotten everything before the last round."""

    def local_rounds(self, broadcast, cohort):
        for client in cohort:
            forgets = (broadcast.round, client) == (LAST, FORGETFUL)
            with one_thread():
                trained = self._worker.local_round(broadcast, client, None if forgets else self.memory[client])
                self._kept[client] = trained.kept
                yield trained.upload


@pytest.mark.parametrize("policy", ["refuse", "anew"])
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_memory_is_noticed_and_the_policy_holds(
    deployed, tmp_path, capsys, loss, policy, small, simulated, cut_in
):
    recipe, memory = small(*KEEPING, f"deployment.memory={policy}"), tmp_path / "memory"
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(1), memory=str(memory))
    (folder,) = memory.glob(f"*/client-{FORGETFUL}")
    three_rounds_old = (folder / "00000000.safetensors").read_bytes()
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(LAST), memory=str(memory))
    loss(folder, three_rounds_old)
    model, records = deployed(recipe, memory=str(memory))
    if policy == "refuse":
        (refusal,) = records[-1]["refused"]
        assert (refusal["client"], refusal["reason"]) == (FORGETFUL, "raised")
        assert f"its memory of round {LAST - 1} is {LOSSES[loss]}" in refusal["detail"]
        assert records[-1]["cohort"] == [0, 1, 3]
    else:
        assert f"client {FORGETFUL} in round {LAST}: its memory of round {LAST - 1} is " in capsys.readouterr().out
        here = simulated(recipe, lambda problem, state: Forgetful(problem))
        assert (model, records) == here


def test_without_a_directory_for_it_memory_lasts_as_long_as_the_node(deployed, small, cut_in):
    recipe = small(*KEEPING)
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(LAST))
    with pytest.raises(TrainingError, match=r"rounds in a row were skipped.* its memory of round 3 is missing"):
        deployed(small(*KEEPING, "server.rounds=9"))  # all nodes are new


PROBE = """
from torch import nn

SHIFT = 0.0

class Probe(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))
        self[1].requires_grad_(False)
        self[1].bias.data += SHIFT
"""


# What each client's own file allows; the default number of samples is more than these clients have.
ALLOWED = 'code = ["flower_probe"]\n[answers]\nmin_samples = 1\n'


@pytest.fixture
def probing(tmp_path, monkeypatch, loopback):
    """The import path of a model with a frozen body, and a grid on which client 2 has another one."""
    (tmp_path / "flower_probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    import flower_probe

    trust("flower_probe")

    class Differing(loopback.InProcess):
        def answers(self, message):
            with monkeypatch.context() as patch:
                patch.setattr(flower_probe, "SHIFT", float(message.metadata.dst_node_id == 102))
                return super().answers(message)

    return "model.name=flower_probe:Probe", Differing


def test_a_model_with_frozen_weights_is_deployed_as_it_is_simulated(deployed, probing, small, simulated):
    model, outcome = probing[0], deployed(small(probing[0], "method=feddyn"), policy=ALLOWED)
    assert outcome == simulated(small(model, "method=feddyn"))
    assert outcome[1][0]["bytes_down"] == 3 * 4 * (8 * 10 + 10)


def test_a_client_with_other_frozen_weights_is_refused_before_it_trains(deployed, probing, small, capsys):
    model, differing = probing
    with pytest.raises(TrainingError, match=r"^only 3 of 4 clients are connected after 0.3 s \(missing: 2\); "):
        deployed(small(model, "deployment.wait=0.3"), differing, policy=ALLOWED)
    named = {line for line in capsys.readouterr().out.splitlines() if line.startswith("node 102 is not one of")}
    assert len(named) == 1
    assert re.search(
        r"^node 102 is not one of the 4 clients: the frozen weights of client 2 \(the base \w{12}…\) and of the "
        r"server \(the base \w{12}…\) differ; give both the same model$",
        *named,
    )
    _, records = deployed(small(model, "deployment.nodes=3"), differing, policy=ALLOWED)
    assert 2 not in {client for record in records for client in record["cohort"]}


def test_adapters_alone_cross_the_wire(deployed, loopback, small, simulated):
    """The bytes of the arrays in all training messages, counted on the grid: the adapters' and NumPy's headers."""
    crossed = {"down": 0, "up": 0, "messages": 0}

    class Counting(loopback.InProcess):
        def answers(self, message):
            replies = super().answers(message)
            if message.metadata.message_type == "train":
                crossed["messages"] += 1
                for way, record in ("down", message.content), ("up", replies[0].content):
                    crossed[way] += sum(
                        len(array.data) for found in record.array_records.values() for array in found.values()
                    )
            return replies

    recipe = small("model.lora={rank = 1, targets = 'all'}", "server.rounds=1")
    outcome = deployed(recipe, Counting)
    assert outcome == simulated(recipe)
    size = 4 * (64 + 8 + 8 + 10)  # float32 of a rank-1 adapter for each of the two layers
    assert crossed["messages"] == 3 and outcome[1][0]["bytes_down"] == outcome[1][0]["bytes_up"] == 3 * size
    for way in ("down", "up"):
        assert 3 * size <= crossed[way] <= 3 * (size + 128)
