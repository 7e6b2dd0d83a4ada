"""Attention that can be differentiated more than once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def plain_attention() -> Iterator[None]:
    """Compute attention by matrix products within this context.

    The fused kernels and the fast path of nn.Transformer have no second derivative.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
