"""Replies that are no good: refused, counted, and the model is as if they had never come."""

import io
import math

import numpy as np
import pytest

from fedflat.engine.inline import Inline

flwr = pytest.importorskip("flwr.app")
pytestmark = pytest.mark.filterwarnings("ignore")
BAD = 2


class Without(Inline):
    """The simulator, as if the bad client had never been drawn."""

    def local_rounds(self, broadcast, cohort):
        return super().local_rounds(broadcast, [client for client in cohort if client != BAD])


def without_the_bad_one(problem, state):
    return Without(problem)


def changed(reply, facts=None, **vectors):
    """The same reply with other facts or arrays."""
    reply.content["facts"].update(facts or {})
    reply.content["vectors"].update(vectors)
    return [reply]


def without(reply, name):
    del reply.content["facts"][name]
    return [reply]


def packed(reply, data, stype="numpy.ndarray"):
    return changed(reply, delta=flwr.Array("float32", (1,), stype, data))


def delta(reply):
    return reply.content["vectors"]["delta"].numpy()


def not_finite(reply):
    bad = delta(reply).copy()
    bad[3] = math.nan
    return changed(reply, delta=flwr.Array(bad))


def failed(reply, message):
    return [flwr.Message(flwr.Error(code=2, reason="disk on fire"), reply_to=message)]


def objects(reply):
    """An array of Python objects, as pickle writes it."""
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    return packed(reply, file.getvalue())


def endless(reply):
    """A few bytes that announce an array of an exabyte."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (250000000000000000,), }"
    header = header.ljust(117) + b"\n"
    return packed(reply, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


SPOILT = {
    "not finite": ("not finite", lambda r, m: not_finite(r)),
    "oversized": ("oversized", lambda r, m: changed(r, more=flwr.Array(delta(r).repeat(50)))),
    "of an earlier round": ("stale", lambda r, m: changed(r, {"round": -1})),
    "of another client": ("foreign", lambda r, m: changed(r, {"client": 3})),
    "of another run": ("foreign", lambda r, m: changed(r, {"run": "0" * 16})),
    "an error": ("raised", failed),
    "without its steps": ("names", lambda r, m: without(r, "steps")),
    "with a vector nobody asked for": ("names", lambda r, m: changed(r, more=flwr.Array(delta(r)[:1]))),
    "of another precision": ("dtype", lambda r, m: changed(r, delta=flwr.Array(delta(r).astype("float64")))),
    "of the other byte order": ("dtype", lambda r, m: changed(r, delta=flwr.Array(delta(r).astype(">f4")))),
    "of words": ("dtype", lambda r, m: changed(r, delta=flwr.Array(delta(r)[:9].astype("U8")))),
    "of another shape": ("shape", lambda r, m: changed(r, delta=flwr.Array(delta(r)[:-1]))),
    "with objects": ("shape", lambda r, m: objects(r)),
    "with endless objects": ("shape", lambda r, m: endless(r)),
    "with nothing in it": ("shape", lambda r, m: packed(r, b"")),
    "packed otherwise": ("dtype", lambda r, m: packed(r, b"cos\nsystem\n", "pickle")),
    "of no samples": ("weight", lambda r, m: changed(r, {"samples": 0})),
    "with words for numbers": ("weight", lambda r, m: changed(r, {"steps": "many"})),
    "silent": ("hung", lambda r, m: []),
}


def spoilt(grid, spoil):
    """A grid on which the bad client's replies to broadcasts are no good."""

    class Spoilt(grid):
        def answers(self, message):
            replies = super().answers(message)
            bad = message.metadata.message_type == "train" and message.metadata.dst_node_id == 100 + BAD
            return spoil(replies[0], message) if bad else replies

    return Spoilt


@pytest.mark.parametrize("fault", SPOILT)
def test_a_reply_that_is_no_good_is_refused_and_changes_nothing(deployed, loopback, fault, small, simulated):
    reason, spoil = SPOILT[fault]
    recipe = small("method=scaffold", "server.rounds=2", "admission.deadline=0.5")
    model, records = deployed(recipe, spoilt(loopback.InProcess, spoil))
    refused = [refusal for record in records for refusal in record.pop("refused", ())]
    assert refused and {(refusal["client"], refusal["reason"]) for refusal in refused} == {(BAD, reason)}
    expected, undisturbed = simulated(recipe, without_the_bad_one)
    assert model == expected
    assert [record["cohort"] for record in records] == [record["cohort"] for record in undisturbed]


def test_of_two_replies_to_one_message_the_first_counts(deployed, loopback, small, simulated):
    model, records = deployed(small("method=scaffold"), spoilt(loopback.InProcess, lambda r, m: [r, r]))
    refused = [refusal for record in records for refusal in record.pop("refused", ())]
    assert refused and {(refusal["client"], refusal["reason"]) for refusal in refused} == {(BAD, "doubled")}
    assert (model, records) == simulated(small("method=scaffold"))


def test_the_order_in_which_replies_come_does_not_matter(deployed, loopback, small, simulated):
    class Backwards(loopback.InProcess):
        def pull_messages(self, names):
            return super().pull_messages(names)[::-1]

    assert deployed(small(), Backwards) == simulated(small())


@pytest.mark.parametrize("way", ["not listed", "takes no message"])
def test_a_client_that_has_left_is_left_out(deployed, loopback, way, small, simulated):
    class Left(loopback.InProcess):
        def get_node_ids(self):
            ids, self.asked = super().get_node_ids(), getattr(self, "asked", 0) + 1
            return [node for node in ids if node != 100 + BAD or self.asked == 1 or way != "not listed"]

        def push_messages(self, messages):
            (message,) = messages
            gone = message.metadata.message_type == "train" and message.metadata.dst_node_id == 100 + BAD
            # Flower's answer to a message that it cannot deliver
            return [None] if gone else super().push_messages(messages)

    model, records = deployed(small(), Left)
    refused = {(r["client"], r["reason"]) for record in records for r in record.get("refused", ())}
    assert refused == {(BAD, "absent" if way == "not listed" else "hung")}
    assert model == simulated(small(), without_the_bad_one)[0]
