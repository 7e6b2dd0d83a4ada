"""Engines: run local rounds in this process, in worker processes, or on Ray."""

from fedflat.engine.cluster import Cluster
from fedflat.engine.heap import keep_freed_memory, settled_worker
from fedflat.engine.inline import Inline
from fedflat.engine.pool import Pool, cores
from fedflat.engine.processor import require_bf16
from fedflat.engine.store import Scratch
from fedflat.engine.wire_format import NUMBERS, arrays, vectors

__all__ = [
    "NUMBERS",
    "Cluster",
    "Inline",
    "Pool",
    "Scratch",
    "arrays",
    "cores",
    "keep_freed_memory",
    "require_bf16",
    "settled_worker",
    "vectors",
]
