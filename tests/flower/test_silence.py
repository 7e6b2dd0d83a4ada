"""Nodes that say nothing, too much, or what cannot be: they cost little time and no trust."""

import time

import numpy as np
import pytest

from fedflat.errors import TrainingError

flwr = pytest.importorskip("flwr.app")
nodes = pytest.importorskip("fedflat.flower.nodes")
messages = pytest.importorskip("fedflat.flower.messages")
pytestmark = pytest.mark.filterwarnings("ignore")
BAD = 2
LOUD = "\x1b]0;owned\x07\x1b[31mdisk\u202e on fire\r\n" + "!" * 5_000_000


def answering(grid, kind, answer, heard=None):
    """A grid on which the bad client's replies to one kind of message are of its own making."""
    heard = [] if heard is None else heard

    class Answering(grid):
        def answers(self, message):
            if message.metadata.message_type != kind or message.metadata.dst_node_id != 100 + BAD:
                return super().answers(message)
            heard.append(message.metadata.group_id)
            return answer(message, super().answers)

    return Answering


def changed(facts):
    def answer(message, honest):
        (reply,) = honest(message)
        reply.content["facts"].update(facts)
        return [reply]

    return answer


def failed(message, honest):
    return [flwr.Message(flwr.Error(code=2, reason=LOUD), reply_to=message)]


# --------------------------------------------------------------------------------------------------------------------
# Silence
# --------------------------------------------------------------------------------------------------------------------


def test_a_node_that_does_not_say_who_it_is_costs_no_time(deployed, loopback, small, simulated):
    class Crowded(loopback.InProcess):
        """One more node, which never answers anything."""

        asked = 0

        def get_node_ids(self):
            return [7, *super().get_node_ids()]

        def answers(self, message):
            if message.metadata.dst_node_id != 7:
                return super().answers(message)
            type(self).asked += 1
            return []

    begun = time.monotonic()
    assert deployed(small(), Crowded) == simulated(small())
    assert Crowded.asked == 1
    assert time.monotonic() - begun < 60


def test_it_is_asked_again_after_ever_longer_whiles(small, loopback, monkeypatch):
    from fedflat.flower import client_app

    heard, clock = [], [0.0]
    silent = answering(loopback.InProcess, "query", lambda m, honest: [], heard)(client_app(small()), 4)
    monkeypatch.setattr(nodes.time, "monotonic", lambda: clock[0])
    known, times = nodes.Nodes(silent, small()), []
    for second in range(2000):
        clock[0], before = float(second), len(heard)
        known.online()
        times += [second] * (len(heard) - before)
    assert times == [0, 60, 180, 420, 900, 1860]


def test_a_client_that_never_replies_is_waited_for_a_few_times_only(deployed, loopback, small):
    recipe = small("server.cohort=4", "server.rounds=16", "admission.deadline=0.5", "deployment.misses=2")
    grid = answering(loopback.InProcess, "train", lambda m, honest: [])
    _, records = deployed(recipe, grid)
    reasons = [record["refused"][0]["reason"] for record in records]
    assert [round for round, reason in enumerate(reasons) if reason == "hung"] == [0, 1, 4, 9]
    assert {*reasons} == {"hung", "silent"}
    assert records[2]["refused"][0]["detail"] == "no reply in its last rounds; it is asked again from round 4 on"


def test_one_reply_makes_up_for_it(deployed, loopback, small):
    def late(message, honest):
        return honest(message) if int(message.metadata.group_id) >= 4 else []

    recipe = small("server.cohort=4", "server.rounds=8", "admission.deadline=0.3", "deployment.misses=2")
    _, records = deployed(recipe, answering(loopback.InProcess, "train", late))
    assert [BAD in record["cohort"] for record in records] == [False] * 4 + [True] * 4


def test_where_everybody_is_silent_they_are_asked_all_the_same(deployed, loopback, small):
    class Deaf(loopback.InProcess):
        def answers(self, message):
            late = int(message.metadata.group_id or 0) < 3 and message.metadata.message_type == "train"
            return [] if late else super().answers(message)

    recipe = small("admission.deadline=0.2", "deployment.misses=1", "admission.patience=9", "server.rounds=5")
    assert [bool(record["cohort"]) for record in deployed(recipe, Deaf)[1]] == [False, False, False, True, True]


# --------------------------------------------------------------------------------------------------------------------
# Hello
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, -5, 2**62, 1_000_000_001, True, 3.5, "many"])
def test_a_number_of_samples_out_of_its_range_is_refused_at_hello(deployed, loopback, small, samples, capsys):
    recipe = small("deployment.nodes=3", "server.rounds=1", "server.cohort=4", "deployment.wait=20")
    _, (record,) = deployed(recipe, answering(loopback.InProcess, "query", changed({"samples": samples})))
    assert record["cohort"] == [0, 1, 3]
    assert [(r["client"], r["reason"]) for r in record["refused"]] == [(BAD, "absent")]
    assert f"samples = {samples!r} is not a whole number from 1 to 1000000000" in capsys.readouterr().out


def test_an_upload_of_other_samples_than_hellos_is_refused(deployed, loopback, small):
    recipe = small("server.rounds=1", "server.cohort=4")
    _, (record,) = deployed(recipe, answering(loopback.InProcess, "train", changed({"samples": 10**9})))
    (refusal,) = record["refused"]
    assert refusal["reason"] == "weight" and "samples = 1000000000, but its hello said" in refusal["detail"]


# --------------------------------------------------------------------------------------------------------------------
# Texts
# --------------------------------------------------------------------------------------------------------------------


def quiet(text):
    return len(text) < 500 and text.isprintable()


def test_a_text_of_five_megabytes_becomes_a_line(deployed, loopback, small, capsys):
    _, records = deployed(small("server.cohort=4"), answering(loopback.InProcess, "train", failed))
    details = [refusal["detail"] for record in records for refusal in record["refused"]]
    assert details[0].startswith("error 2: �]0;owned��[31mdisk� on fire !!!") and all(map(quiet, details))
    assert all(map(quiet, capsys.readouterr().out.splitlines()))


def test_so_do_those_of_hello_and_of_notes_that_are_no_notes(deployed, loopback, small, capsys):
    recipe = small("deployment.nodes=3", "server.rounds=1", "server.cohort=4", "deployment.wait=20")
    deployed(recipe, answering(loopback.InProcess, "query", failed))
    lines = capsys.readouterr().out.splitlines()
    assert any("on fire" in line for line in lines) and all(map(quiet, lines))
    with pytest.raises(TrainingError, match="on fire") as stopped:
        deployed(small("deployment.wait=0.3"), answering(loopback.InProcess, "query", failed))
    assert quiet(str(stopped.value).replace("…", ""))


@pytest.mark.parametrize("field", ["forgiven", "refused", "digest", "run", "round"])
def test_no_field_of_an_upload_brings_a_long_text_in(deployed, loopback, small, capsys, field):
    recipe = small("method=scaffold", "server.rounds=1", "server.cohort=4")
    _, (record,) = deployed(recipe, answering(loopback.InProcess, "train", changed({field: LOUD})))
    assert all(quiet(refusal["detail"]) for refusal in record.get("refused", ()))
    assert all(map(quiet, capsys.readouterr().out.splitlines()))


def with_notes(notes):
    def answer(message, honest):
        (reply,) = honest(message)
        reply.content["notes"].update(notes)
        return [reply]

    return answer


NOTES = [{f"n{i}": 1.0 for i in range(200_000)}, {"\x1b[31m": 1.0}, {"x" * 99: 1.0}, {"n": "1"}]


@pytest.mark.parametrize("notes", NOTES, ids=["many", "loud", "long", "words"])
def test_notes_are_few_and_short(deployed, loopback, small, notes):
    recipe = small("server.rounds=1", "server.cohort=4")
    _, (record,) = deployed(recipe, answering(loopback.InProcess, "train", with_notes(notes)))
    (refusal,) = record["refused"]
    assert refusal["reason"] == "names" and quiet(refusal["detail"]) and len(str(record)) < 2000


# --------------------------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------------------------


def eigenvalue(forged):
    """The answer of a client whose every vector is an eigenvector."""

    def answer(message, honest):
        (reply,) = honest(message)
        vector = message.content["vectors"]["vector"].numpy()
        reply.content["vectors"]["answer"] = flwr.Array((forged * vector).astype("float32"))
        return [reply]

    return answer


NOT_FINITE = "answer has entries that are not finite"
FORGED = {1e37: "not plausible", 5e5: "not plausible", float("nan"): NOT_FINITE, float("inf"): NOT_FINITE}


@pytest.mark.parametrize(("forged", "why"), FORGED.items())
def test_a_forged_curvature_is_not_believed(deployed, loopback, small, forged, why):
    recipe = small("server.rounds=1", "evaluation.sharpness=1", "evaluation.sharpness_samples=100")
    _, (record,) = deployed(recipe, answering(loopback.InProcess, "query.hessian", eigenvalue(forged)))
    assert record["lambda1"] is None
    assert f"client {BAD}" in record["sharpness_missing"] and why in record["sharpness_missing"]


@pytest.mark.parametrize("forged", FORGED)
def test_nor_is_a_forged_eigenvalue(deployed, loopback, small, forged):
    def answer(message, honest):
        (reply,) = honest(message)
        reply.content["vectors"]["answer"] = flwr.Array(np.array([forged], dtype="float32"))
        return [reply]

    recipe = small("server.rounds=1", "server.cohort=4", 'evaluation.measures=["local_curvature"]')
    allowed = "[answers]\ncurvature = 9\nmin_samples = 1"
    _, (record,) = deployed(recipe, answering(loopback.InProcess, "query.curvature", answer), policy=allowed)
    assert record["local_lambda1"] is None and BAD in record["cohort"]


def test_an_answer_of_another_shape_is_not_read(deployed, loopback, small):
    def longer(message, honest):
        (reply,) = honest(message)
        reply.content["vectors"]["answer"] = flwr.Array(reply.content["vectors"]["answer"].numpy().repeat(50))
        return [reply]

    recipe = small("server.rounds=1", "evaluation.sharpness=1")
    _, (record,) = deployed(recipe, answering(loopback.InProcess, "query.hessian", longer))
    assert record["lambda1"] is None and "need only 2,4" in record["sharpness_missing"]
