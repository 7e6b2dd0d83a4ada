"""Kernel for ascents that perturb only the head: both gradients share one pass through the body."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedflat.local.rule import LocalRule, Loss, Term
from fedflat.models import Forward, Network

if TYPE_CHECKING:
    from fedflat.local.slope import Slope


def draws_masks(network: Network) -> bool:
    """Return whether the network has dropout, so that two passes over one batch differ."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) for module in network.module.modules())


class HeadPass:
    """Computes both gradients of an ascent that perturbs only the head, with one pass through the body.

    It applies to an ascent with `head_only = True`. Such an ascent first requests the gradient of the terms with
    respect to the head (`in_head`), then the full gradient with the head perturbed (`at_head`). With dropout the two
    passes use different masks, so the body must run twice and this kernel does not apply. Nor does it apply if the
    module does more behind its head.
    """

    def __init__(self, network: Network, rule: LocalRule) -> None:
        self._network = network
        self._kept: Forward | None = None

    @classmethod
    def fits(cls, network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> bool:
        return getattr(rule.ascent, "head_only", False) and network.ends_in_head and not draws_masks(network)

    def in_head(self, slope: Slope, terms: tuple[Term, ...]) -> Tensor:
        """Return the gradient of the terms at w with respect to the head, and keep the graph for `at_head`."""
        self._kept = slope.forward()
        return self._network.differentiate_head(slope.objective(terms, data=False, forward=self._kept))

    def at_head(self, slope: Slope) -> Tensor:
        """Return the full gradient at the current head, reusing the features of the previous pass."""
        assert self._kept is not None and self._kept.features is not None
        logits = slope.tap.through(self._network.head_module, self._kept.features)
        forward, self._kept = replace(self._kept, logits=logits), None
        return self._network.differentiate(slope.objective(forward=forward, at_w=False))
