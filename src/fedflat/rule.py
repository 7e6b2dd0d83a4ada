"""What one client does in one round, as data: the ingredients of the local step, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.vector import Layout

if TYPE_CHECKING:
    from fedflat.slope import Pass, Slope

Vectors = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
ClipMode = Literal["loss_only", "official", "all"]


class Term(Protocol):
    """Something added to the loss of a batch: a scalar made from a pass and, if need be, from a reference's pass.

    A term or an ascent with `features = True` finds in each pass what entered the head, and one with
    `activations = True` the hidden activations.
    """

    def __call__(self, here: Pass) -> Tensor: ...


class Ascent(Protocol):
    """Where the gradient is taken: given ∇[loss + Σ terms] as a function of ε, the gradient to descend by.

    One with `rows = True` also works on a matrix whose rows are the weights of several clients.
    """

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]: ...


class Descent(Protocol):
    """The optimiser of the local step: from a gradient and its own memory, the direction to go against.

    It begins every round anew with `start`. Without one the step is SGD with the recipe's momentum.
    """

    def start(self, weights: Tensor) -> Vectors: ...

    def __call__(
        self, g: Tensor, weights: Tensor, memory: Vectors, layout: Layout, k: int
    ) -> tuple[Tensor, Vectors]: ...


@dataclass(frozen=True)
class LocalRule:
    """What one client does in one round.

    The upper fields are facts of the round that parts may read: `share` is nᵢ m/N, `first_lr` is η of round 0,
    `typical_steps` is the K of a client of mean size, `epochs` are the passes over the samples that make the steps (1
    where the recipe counts steps); draws are made from seed, round and client.

    The lower ones are theirs to fill, by the methods below where several parts may. `spring` is a decay inside the
    clip. `carry` is what an ascent hands from step to step (FedSMOO's μ), and `report` finds it in the outcome.
    `frozen` marks the weights that no step changes; with `pairs` every step has a second batch, and `buffered` counts
    the gradients of a step that enter the momentum.
    """

    lr: float
    steps: int
    epochs: int = 1
    first_lr: float = 0.0
    typical_steps: int = 1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None
    clip_mode: ClipMode = "loss_only"
    share: float = 1.0
    layout: Layout = field(default_factory=lambda: Layout({}))
    head: slice = field(default_factory=lambda: slice(0))
    measures: Sequence[str] = ()
    seed: int = 0
    round: int = 0
    client: int = 0

    scale: float = 1.0
    pull: Tensor | None = None
    decay: float = 0.0
    spring: float = 0.0
    terms: tuple[Term, ...] = ()
    ascent: Ascent | None = None
    descent: Descent | None = None
    carry: Vectors = field(default_factory=dict)
    lr_floor: float = 1.0
    frozen: Tensor | None = None
    pairs: bool = False
    buffered: int = 1

    def with_pull(self, pull: Tensor, decay: float = 0.0, spring: float = 0.0) -> LocalRule:
        """The rule with one more pull, decay and spring."""
        pull = pull if self.pull is None else self.pull + pull
        return replace(self, pull=pull, decay=self.decay + decay, spring=self.spring + spring)

    def with_term(self, term: Term) -> LocalRule:
        """The rule with one more term of the loss."""
        return replace(self, terms=(*self.terms, term))

    def with_ascent(self, ascent: Ascent, **carry: Tensor) -> LocalRule:
        """The rule with an ascent, and what it carries from step to step."""
        return replace(self, ascent=ascent, carry={**self.carry, **carry})

    def with_descent(self, descent: Descent) -> LocalRule:
        """The rule with another optimiser than SGD."""
        return replace(self, descent=descent)

    def blank(self) -> LocalRule:
        """The facts of the rule, and none of its ingredients."""
        empty = LocalRule(self.lr, self.steps)
        return replace(self, **{name: getattr(empty, name) for name in INGREDIENTS})

    @property
    def direct(self) -> bool:
        """Whether a step goes down ∇[loss + Σ terms](w) as it is, with momentum and decay but nothing else."""
        bare = self.pull is None and self.ascent is None and self.frozen is None and not self.pairs
        bare = bare and self.descent is None
        return bare and not self.clip and self.scale == 1.0 and not self.spring

    @property
    def plain(self) -> bool:
        """Whether a step is w ← w − η (∇loss + decay · w) and nothing else."""
        return self.direct and not self.terms and not self.momentum

    def lr_at(self, k: int) -> float:
        """η_k, falling linearly towards `lr_floor` · η over the K steps."""
        return self.lr * (1 - (1 - self.lr_floor) * k / self.steps)

    @property
    def mean_lr(self) -> float:
        """The mean of the η_k."""
        return self.lr * (1 - (1 - self.lr_floor) * (self.steps - 1) / (2 * self.steps))

    @property
    def effective_steps(self) -> float:
        """K, or with momentum β the sum of the weights with which the gradients enter Δ/η:

        Σ_k (1 − β^{bk})/(1 − β),   k = 1 … K,   with b gradients entering the momentum in every step

        and with Nesterov's look ahead Σ_k (1 − β^{bk+1})/(1 − β).
        """
        if self.descent is not None:
            raise RecipeError(f"it divides Δ by K η, which {type(self.descent).__name__} does not have; take SGD")
        beta, steps = self.momentum, self.steps
        fading = beta**self.buffered
        lead = beta if self.nesterov else 1.0
        return (steps - lead * fading * (1 - fading**steps) / (1 - fading)) / (1 - beta)


# The fields of a rule that parts fill; what the model freezes is a fact.
INGREDIENTS = (
    "scale",
    "pull",
    "decay",
    "spring",
    "terms",
    "ascent",
    "descent",
    "carry",
    "lr_floor",
    "pairs",
    "buffered",
)
SAMPLED = 8  # steps between two looks at w in methods that never take a gradient there


@dataclass(frozen=True)
class Outcome:
    """What a client's training came to: Δ = w_K − w_0, after K steps."""

    delta: Tensor
    loss: float
    rule: LocalRule
    carry: Vectors
    notes: dict[str, float]
