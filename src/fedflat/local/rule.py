"""Data of one client's round: the ingredients of the local step, and the result of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Generator, Tensor

from fedflat.errors import RecipeError
from fedflat.models import Layout
from fedflat.randomness import generator
from fedflat.tasks import Loss as Loss  # re-exported

if TYPE_CHECKING:
    from fedflat.local.slope import Pass, Slope

Vectors = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
ClipMode = Literal["loss_only", "official", "all"]


class Term(Protocol):
    """A scalar that is added to the loss of a batch, computed from a forward pass.

    It can also use a pass through a reference model (`Pass.under`). A term or an ascent with `features = True` finds
    the inputs of the head in each pass, and one with `activations = True` the hidden activations. A term with
    `curvature = True` may take further derivatives of the gradient.
    """

    def __call__(self, here: Pass) -> Tensor: ...


class Ascent(Protocol):
    """Chooses where the gradient is taken: maps ∇[loss + Σ terms], a function of ε, to the gradient of the step.

    An ascent with `rows = True` also works on a matrix whose rows are the weights of several clients.
    """

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]: ...


class Descent(Protocol):
    """The optimiser of the local step: maps a gradient and its state to the direction that is subtracted.

    `start` returns its state at the beginning of every round. Without a descent the step is SGD with the recipe's
    momentum.
    """

    def start(self, weights: Tensor) -> Vectors: ...

    def __call__(
        self, g: Tensor, weights: Tensor, memory: Vectors, layout: Layout, k: int
    ) -> tuple[Tensor, Vectors]: ...


@dataclass(frozen=True)
class LocalRule:
    """The rule of one client's training in one round.

    The first group of fields describes the round. Parts may read them: `share` is nᵢ m/N, `first_lr` is η of round 0,
    `typical_steps` is the K of a client of mean size, and `epochs` is the number of passes over the samples (1 if the
    recipe counts steps). Random draws depend on seed, round and client; `stream` separates two parts of one class.
    `graph` asks for CUDA graphs of the steps.

    Parts set the second group, through the methods below where several parts may contribute. `spring` is a decay inside
    the clip. `carry` is the state that an ascent passes from step to step (FedSMOO's μ); `report` finds it in the
    outcome. `watched` terms do not affect the step: they are only evaluated at w and reported. `frozen` marks the
    weights that the steps do not change. With `pairs` every step has a second batch. `buffered` is the number of
    gradients per step that enter the momentum.
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
    stream: str = ""
    graph: bool = False

    scale: float = 1.0
    pull: Tensor | None = None
    decay: float = 0.0
    spring: float = 0.0
    terms: tuple[Term, ...] = ()
    watched: tuple[Term, ...] = ()
    ascent: Ascent | None = None
    descent: Descent | None = None
    carry: Vectors = field(default_factory=dict)
    lr_floor: float = 1.0
    frozen: Tensor | None = None
    pairs: bool = False
    buffered: int = 1

    def with_pull(self, pull: Tensor, decay: float = 0.0, spring: float = 0.0) -> LocalRule:
        """Return the rule with pull + (decay + spring) · w added to every gradient.

        Args:
            pull: a vector.
            decay: the factor of the weights w outside the clip.
            spring: the factor of the weights w inside the clip.
        """
        pull = pull if self.pull is None else self.pull + pull
        return replace(self, pull=pull, decay=self.decay + decay, spring=self.spring + spring)

    def with_term(self, term: Term) -> LocalRule:
        """Return the rule with a loss term added."""
        return replace(self, terms=(*self.terms, term))

    def watching(self, term: Term) -> LocalRule:
        """Return the rule with a term added that is only evaluated and reported."""
        return replace(self, watched=(*self.watched, term))

    def with_ascent(self, ascent: Ascent | None, **carry: Tensor) -> LocalRule:
        """Return the rule with an ascent.

        Args:
            ascent: a function of the slope and its state that returns the gradient of a step and the next state; None
                takes the plain gradient.
            carry: the state at the first step, by name.
        """
        return replace(self, ascent=ascent, carry={**self.carry, **carry})

    def with_descent(self, descent: Descent) -> LocalRule:
        """Return the rule with an optimiser in place of SGD."""
        return replace(self, descent=descent)

    def generator(self, purpose: str) -> Generator:
        """Return a new generator for a part's draws, seeded by seed, purpose, round and client."""
        return generator(self.seed, f"part/{purpose}{self.stream}", self.round, self.client)

    def require_head(self, part: str, body: bool = False) -> None:
        """Check that the head has trained weights of its own.

        Args:
            part: the part that needs them, for the error message.
            body: whether the body must have trained weights too.

        Raises:
            RecipeError: if it has none.
        """
        own = self.head.stop - (self.head.start or 0)
        if not own:
            why = (
                "the model's head has none: it is frozen, shares parameters with another layer, or is not an nn.Linear"
            )
            raise RecipeError(f"method: {part} needs a head with trained weights of its own, and {why}")
        if body and own == self.layout.size:
            raise RecipeError(f"method: {part} needs a body with trained weights, and the model trains its head alone")

    def outcome(self, delta: Tensor) -> Outcome:
        """Return an outcome with this Δ and with the initial states of ascent and optimiser."""
        return Outcome(delta, 1.0, self, self.carry, {}, self.descent.start(delta) if self.descent else {})

    def blank(self) -> LocalRule:
        """Return the rule without the ingredients that parts have set."""
        empty = LocalRule(self.lr, self.steps)
        return replace(self, **{name: getattr(empty, name) for name in INGREDIENTS})

    @property
    def direct(self) -> bool:
        """Whether a step uses `∇[loss + Σ terms](w)` unchanged, with momentum and decay only."""
        bare = self.pull is None and self.ascent is None and self.frozen is None and not self.pairs
        bare = bare and self.descent is None
        return bare and not self.clip and self.scale == 1.0 and not self.spring

    @property
    def plain(self) -> bool:
        """Whether a step is exactly w ← w − η (∇loss + decay · w)."""
        return self.direct and not self.terms and not self.momentum

    def lr_at(self, k: int) -> float:
        """Return η_k, which decreases linearly towards `lr_floor` · η over the K steps."""
        return self.lr * (1 - (1 - self.lr_floor) * k / self.steps)

    @property
    def mean_lr(self) -> float:
        """The mean of the η_k."""
        return self.lr * (1 - (1 - self.lr_floor) * (self.steps - 1) / (2 * self.steps))

    @property
    def effective_steps(self) -> float:
        """K, or with momentum β the sum of the weights with which the gradients enter Δ/η:

        Σ_k (1 − β^{bk})/(1 − β),   k = 1 … K,   with b gradients entering the momentum in every step

        and with Nesterov momentum Σ_k (1 − β^{bk+1})/(1 − β).
        """
        if self.descent is not None:
            part = getattr(self.descent, "part", self.descent)  # an optimiser may know the part that it belongs to
            raise RecipeError(f"it divides Δ by K η, which {type(part).__name__} does not have; take SGD")
        beta, steps = self.momentum, self.steps
        fading = beta**self.buffered
        lead = beta if self.nesterov else 1.0
        return (steps - lead * fading * (1 - fading**steps) / (1 - fading)) / (1 - beta)


_NAMES = tuple(f.name for f in fields(LocalRule))
INGREDIENTS = _NAMES[_NAMES.index("scale") :]  # the second group of fields, which parts set
SAMPLED = 8  # steps between two evaluations at w in methods that take no gradient there


@dataclass(frozen=True)
class Outcome:
    """The result of a client's training: Δ = w_K − w_0 after K steps, and the last states of ascent and optimiser."""

    delta: Tensor
    loss: float
    rule: LocalRule
    carry: Vectors
    notes: dict[str, float]
    descent: Vectors = field(default_factory=dict)
