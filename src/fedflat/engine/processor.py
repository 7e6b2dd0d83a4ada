"""Tests whether this processor can run torch's bfloat16 kernels.

Some virtual machines announce AMX tiles that trap when used, and the process dies of an illegal instruction. A child
process tries them first.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.nn.functional as F

from fedflat.errors import RecipeError

LIMIT, BELOW_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"


@cache
def require_bf16() -> None:
    """Make sure that bfloat16 passes can run, without AMX if necessary.

    Raises:
        RecipeError: if they cannot run in this process.
    """
    if _child_survives():
        return
    # oneDNN reads this limit at its first use, so this only helps a process that has not used it yet.
    os.environ.setdefault(LIMIT, BELOW_AMX)
    if not _child_survives():
        raise RecipeError(
            'precision = "bf16": torch\'s bfloat16 kernels trap on this processor; set '
            f"{LIMIT}={BELOW_AMX} in the environment before Python starts, or take float32"
        )


def _child_survives() -> bool:
    if not hasattr(os, "fork"):
        return True
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.ones(16, 64, requires_grad=True)
                F.linear(x, torch.ones(32, 64)).float().sum().backward()
                F.conv2d(torch.ones(2, 3, 16, 16), torch.ones(8, 3, 5, 5))
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
