"""Flower 1.41's SecAgg+, driven over the message API, and a dishonest server that undoes it.

    python benchmarks/secure_aggregation.py

Three clients run Flower's own `secaggplus_mod`. The server plays its part of the protocol, then names one client as
alive and as lost in the same request for key shares. The others answer both, and the server recovers that client's
update. Exits 1 if it does not, which would be a reason to look at secure aggregation again.
"""

import sys

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common import recorddict_compat
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from flwr.supercore.task_identity import TaskIdentity

NODES, VICTIM, MODULUS, RANGE, CLIP = (101, 102, 103), 101, 2**32, 2**22, 8.0
UPDATES = {node: np.array([node - 102.0, 0.5, -0.25]) for node in NODES}
CONTEXTS = {node: Context(1, node, {}, RecordDict(), run_config={}) for node in NODES}


def ask(node: int, config: dict) -> dict:  # type: ignore[type-arg]
    """Send a node a message of the protocol, and give its answer."""
    message = Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(config)}), dst_node_id=node, message_type="train")
    message.metadata.__dict__["_message_id"] = "1"

    def trained(asked: Message, _: Context) -> Message:
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([UPDATES[node]]), 1000, {})
        return Message(recorddict_compat.fitres_to_recorddict(result, False), reply_to=asked)

    return dict(secaggplus_mod(message, CONTEXTS[node], trained).content.config_records[RECORD_KEY_CONFIGS])


def main() -> int:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    try:
        SecAggPlusWorkflow(3, 2)(None, CONTEXTS[VICTIM])  # type: ignore[arg-type]
    except TypeError as error:
        print(f"flwr.server.workflow.SecAggPlusWorkflow: TypeError: {error}")
    setup = {Key.SAMPLE_NUMBER: 3, Key.SHARE_NUMBER: 3, Key.THRESHOLD: 2, Key.CLIPPING_RANGE: CLIP,
             Key.TARGET_RANGE: RANGE, Key.MOD_RANGE: MODULUS, Key.MAX_WEIGHT: 1000.0}  # fmt: skip
    public = {node: ask(node, {**setup, Key.STAGE: Stage.SETUP}) for node in NODES}
    keys = {str(node): [public[node][Key.PUBLIC_KEY_1], public[node][Key.PUBLIC_KEY_2]] for node in NODES}
    shares = {node: ask(node, {**keys, Key.STAGE: Stage.SHARE_KEYS}) for node in NODES}
    masked = {node: collect(node, shares) for node in NODES}
    found = unmasked(masked[VICTIM], public)
    print(f"client {VICTIM}'s update is {UPDATES[VICTIM].tolist()}, the server recovers {found.round(5).tolist()}")
    return 0 if np.allclose(found, UPDATES[VICTIM], atol=1e-5) else 1


def collect(node: int, shares: dict) -> list:  # type: ignore[type-arg]
    """Forward the encrypted shares to a node, and take its masked vectors."""
    forwarded = [
        (source, ciphertext)
        for source in NODES
        for to, ciphertext in zip(
            shares[source][Key.DESTINATION_LIST], shares[source][Key.CIPHERTEXT_LIST], strict=True
        )
        if to == node
    ]
    sources, ciphertexts = [source for source, _ in forwarded], [ciphertext for _, ciphertext in forwarded]
    stage = {Key.STAGE: Stage.COLLECT_MASKED_VECTORS, Key.CIPHERTEXT_LIST: ciphertexts, Key.SOURCE_LIST: sources}
    return [bytes_to_ndarray(vector) for vector in ask(node, stage)[Key.MASKED_PARAMETERS]]


def unmasked(vectors: list, public: dict) -> np.ndarray:  # type: ignore[type-arg]
    """Recover one client's update: the others give the shares of its seed and of its key."""
    others = [node for node in NODES if node != VICTIM]
    both = {Key.ACTIVE_NODE_ID_LIST: [*NODES], Key.DEAD_NODE_ID_LIST: [VICTIM]}
    told = [ask(node, {**both, Key.STAGE: Stage.UNMASK})[Key.SHARE_LIST] for node in others]
    seed, secret = (combine_shares([each[place] for each in told]) for place in (0, -1))
    shapes = [vector.shape for vector in vectors]
    total = [v - m for v, m in zip(vectors, pseudo_rand_gen(seed, MODULUS, shapes), strict=True)]
    for node in others:
        shared = generate_shared_key(bytes_to_private_key(secret), bytes_to_public_key(public[node][Key.PUBLIC_KEY_1]))
        sign = 1 if node > VICTIM else -1
        total = [v + sign * m for v, m in zip(total, pseudo_rand_gen(shared, MODULUS, shapes), strict=True)]
    return dequantize([v % MODULUS for v in total[1:]], CLIP, RANGE)[0]


if __name__ == "__main__":
    sys.exit(main())
