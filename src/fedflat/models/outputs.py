"""Modules that return their logits inside another object, as those of `transformers` do."""

from __future__ import annotations

from typing import Any

from torch import nn

WRAPPED = ("transformers", "peft")  # packages whose modules return objects


def plain_output(module: nn.Module) -> nn.Module:
    """Let a module return its logits alone if it is known to return an object that has them; return the module.

    A forward hook does this, so that every caller sees it: training, evaluation, derivatives, hooks and export.
    `own_output` removes it.
    """
    if any(kind.__module__.partition(".")[0] in WRAPPED for kind in type(module).__mro__):
        take_logits(module)
    return module


def take_logits(module: nn.Module) -> None:
    """Let a module return the logits of what it returns."""
    if _logits not in module._forward_hooks.values():
        module.register_forward_hook(_logits)


def own_output(module: nn.Module) -> nn.Module:
    """Let a module return again what its class returns; return the module."""
    for key, hook in list(module._forward_hooks.items()):
        if hook is _logits:
            del module._forward_hooks[key]
    return module


def _logits(module: nn.Module, arguments: Any, output: Any) -> Any:
    return getattr(output, "logits", output)
