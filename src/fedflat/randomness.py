"""Every draw comes from a generator made from (seed, purpose, round, client), never from a global one.

So a draw depends on what it is for and not on what was drawn before it: the order of clients, the number of workers and
a resumed run cannot change it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A 63-bit number that is as good as independent for different arguments.

    >>> key(0, "batches", 3, 7) == key(0, "batches", 3, 7) != key(0, "batches", 7, 3)
    True
    """
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """The torch generator of one purpose."""
    return torch.Generator().manual_seed(key(seed, purpose, round, client))


def numpy_generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """The NumPy generator of one purpose."""
    return np.random.default_rng(key(seed, purpose, round, client))


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside leaves torch's global generator as it was."""
    everywhere = device.type != "cpu"
    with torch.random.fork_rng(device_type=device.type) if everywhere else torch.random.fork_rng(devices=[]):
        yield
