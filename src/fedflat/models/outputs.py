"""Support for modules of `transformers` and `peft`, which take tokens with a mask and return an object with logits.

Two hooks convert the inputs and outputs, so that training, evaluation, derivatives, hooks and export see an ordinary
module that maps a tensor to a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.tokens import is_tokens

PACKAGES = ("transformers", "peft")


def plain_output(module: nn.Module) -> nn.Module:
    """Make a module of these packages map padded tokens to logits, and return the module.

    Other modules are not changed. `own_output` removes the hooks.
    """
    if any(kind.__module__.partition(".")[0] in PACKAGES for kind in type(module).__mro__):
        if _masked not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_masked, with_kwargs=True)
        take_logits(module)
    return module


@contextmanager
def with_plain_output(module: nn.Module) -> Iterator[None]:
    """Within this context a module of these packages maps padded tokens to logits; afterwards it is as it was."""
    before = _masked in module._forward_pre_hooks.values()
    plain_output(module)
    try:
        yield
    finally:
        if not before and _masked in module._forward_pre_hooks.values():
            own_output(module)


def take_logits(module: nn.Module) -> None:
    """Make a module return the `logits` of its output."""
    if _logits not in module._forward_hooks.values():
        module.register_forward_hook(_logits)


def own_output(module: nn.Module) -> nn.Module:
    """Remove the hooks of `plain_output` and `take_logits` from a module, and return the module."""
    for key in [key for key, hook in module._forward_hooks.items() if hook is _logits]:
        del module._forward_hooks[key]
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _masked]:
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    return module


def _masked(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Replace padded tokens by tokens and an attention mask."""
    if named or len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not is_tokens(arguments[0]):
        return None
    tokens, padding = arguments[0].long(), getattr(getattr(module, "config", None), "pad_token_id", None) or 0
    there = tokens >= 0
    return (), {"input_ids": torch.where(there, tokens, padding), "attention_mask": there.long()}


def _logits(module: nn.Module, arguments: Any, output: Any) -> Any:
    return getattr(output, "logits", output)
