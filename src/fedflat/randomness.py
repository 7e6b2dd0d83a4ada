"""Random generators made from (seed, purpose, round, client). The global generator is never used.

A draw depends on its purpose and not on earlier draws: the order of clients, the number of workers and resuming a run
cannot change it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b, shake_256

import numpy as np
import torch

TWISTER, OFFSET = 624, 24  # words of a Mersenne twister, and the byte of torch's state where they start


class Secret(int):
    """A seed of up to 256 bits that one side of a deployment keeps secret; it is never printed.

    >>> f"{Secret(2**200)}"
    'Secret(…)'
    """

    def __repr__(self) -> str:
        return "Secret(…)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def about(self, purpose: str, round: int, client: int) -> bytes:
        """All of its bits, combined with their purpose."""
        return self.to_bytes(32, "big") + f"/{purpose}/{round}/{client}".encode()


def key(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Return a 63-bit number that is effectively independent for different arguments.

    Args:
        seed: the seed of the run, or a secret.
        purpose: what the number is for, such as "batches".
        round: the round, if the draw depends on it.
        client: the client, if the draw depends on it.

    >>> key(0, "batches", 3, 7) == key(0, "batches", 3, 7) != key(0, "batches", 7, 3)
    True
    """
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    if isinstance(seed, Secret):
        text = seed.about(purpose, round, client)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """Return the torch generator of one purpose. The arguments are those of `key`."""
    made = torch.Generator().manual_seed(key(seed, purpose, round, client))
    return _filled(made, seed.about(purpose, round, client)) if isinstance(seed, Secret) else made


def numpy_generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return the NumPy generator of one purpose. The arguments are those of `key`."""
    if isinstance(seed, Secret):
        whole = int.from_bytes(blake2b(seed.about(purpose, round, client), digest_size=32).digest(), "big")
        return np.random.default_rng(whole)
    return np.random.default_rng(key(seed, purpose, round, client))


def _filled(made: torch.Generator, secret: bytes) -> torch.Generator:
    """A Mersenne twister with its whole state filled from a secret: `manual_seed` uses only 32 bits of its seed."""
    state = made.get_state()
    words = np.frombuffer(shake_256(secret).digest(4 * TWISTER), np.uint32).astype(np.uint64)
    state.numpy()[OFFSET : OFFSET + 8 * TWISTER] = words.view(np.uint8)
    made.set_state(state)
    return made


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Restore torch's global generator on exit."""
    everywhere = device.type != "cpu"
    with torch.random.fork_rng(device_type=device.type) if everywhere else torch.random.fork_rng(devices=[]):
        yield
