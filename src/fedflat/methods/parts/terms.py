"""Parts that add a term to the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Outcome, Pass, Vectors
from fedflat.methods.part import Part, ServerView, option
from fedflat.methods.uploads import Upload, Uploads

Layers = Literal["all", "official_convnet"]


@dataclass(frozen=True)
class ActivationNorm(Part):
    """Minimise the norm of the activations (MAN):  ζ/2 Σ_l mean(a_l²) over all hidden activations a_l.

    The mean is over batch and units, in texts also over tokens but not over padding; the sum is over layers, without
    the logits. a_l is the output of an activation module, before any pooling. The Hessian block of the next layer is
    E[a aᵀ ⊗ ∇²_z ℓ], so a smaller ‖a‖ bounds its top eigenvalue. The term is part of the loss in all gradients,
    including those of ascents.

    Deviations: none from the authors' code for LeNet. The text of the paper was not available: `layers = "all"` follows
    their code for LeNet, and is our interpretation for other networks. For ConvNet-GN their code omits the term of the
    third layer and adds the variance over the batch of the last hidden layer (0 for a batch of one);
    `layers = "official_convnet"` reproduces this.
    """

    zeta: float = option(0.15, "weight ζ of the activations' squared norm", low=0)
    layers: Layers = option("all", "which activations", choices=("all", "official_convnet"))
    attention: bool = option(False, "also what each attention has mixed, the input of its last linear layer")

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        term = ActivationTerm(self.zeta, self.layers, self.attention)
        return rule.with_term(term) if self.zeta else rule.watching(term)


@dataclass(frozen=True)
class ActivationTerm:
    """ζ/2 Σ_l mean(a_l²) of one pass."""

    activations: ClassVar[bool] = True

    zeta: float
    layers: Layers = "all"
    attention: bool = False

    def __call__(self, here: Pass) -> Tensor:
        norms = here.forward.squares
        for name, norm in norms.items():
            here.note(f"activation/{name}", norm)
        if self.layers == "official_convnet":
            return 0.5 * self.zeta * self._official(here, norms)
        return 0.5 * self.zeta * torch.stack(list(norms.values())).sum()

    def _official(self, here: Pass, norms: dict[str, Tensor]) -> Tensor:
        if len(norms) != 5:
            raise RecipeError(
                f"man: layers = 'official_convnet' is for convnet-gn; this model has {len(norms)} activations"
            )
        conv1, conv2, _, fc1, fc2 = norms.values()
        last = list(here.forward.activations.values())[-1]
        spread = last.var(dim=0).mean() if len(last) > 1 else 0.0
        return conv1 + conv2 + fc1 + fc2 + spread


@dataclass(frozen=True)
class Distillation(Part):
    """Distil the global model:  β KL( softmax(z_g/τ) ‖ softmax(z/τ) ), the mean over the batch.

    z_g are the logits of the frozen global model on the same batch. If the term only gives the direction of FedSoL's
    perturbation, its scale does not matter. In the ablations that also minimise it (A2 to A6) it has no factor τ².
    """

    needs_classes = True

    tau: float = option(3.0, "temperature τ", low=0, open_low=True)
    beta: float = option(1.0, "weight β", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_term(DistillationTerm(sent["weights"], self.tau, self.beta)) if self.beta else rule


def divergence(theirs: Tensor, ours: Tensor, tau: float) -> Tensor:
    """Return KL( softmax(theirs/τ) ‖ softmax(ours/τ) ), the mean over the batch."""
    return F.kl_div(
        F.log_softmax(ours / tau, 1), F.log_softmax(theirs / tau, 1), reduction="batchmean", log_target=True
    )


@dataclass(frozen=True)
class DistillationTerm:
    """β KL against the frozen model with the weights `anchor`."""

    anchor: Tensor
    tau: float
    beta: float

    def __call__(self, here: Pass) -> Tensor:
        return self.beta * divergence(here.under(self.anchor).logits, here.logits, self.tau)


@dataclass(frozen=True)
class NotTrueDistillation(Part):
    """Distil the global model on the classes other than the true one (FedNTD):

        β τ² KL( softmax(z̃_g/τ) ‖ softmax(z̃/τ) ),      z̃ = logits without the true class.

    Deviations: none.
    """

    needs_classes = True

    beta: float = option(1.0, "weight β", low=0)
    tau: float = option(1.0, "temperature τ", low=0, open_low=True)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_term(NotTrueTerm(sent["weights"], self.tau, self.beta)) if self.beta else rule


@dataclass(frozen=True)
class NotTrueTerm(DistillationTerm):
    """β τ² KL over the not-true classes."""

    def __call__(self, here: Pass) -> Tensor:
        theirs = _without(here.under(self.anchor).logits, here.labels)
        return self.beta * self.tau**2 * divergence(theirs, _without(here.logits, here.labels), self.tau)


def _without(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits without the true class: (B, C) → (B, C − 1)."""
    others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, labels[:, None], False)
    return logits[others].view(len(logits), -1)


@dataclass(frozen=True)
class MovingTeacher(Part):
    """Distil a moving average of the global models (FedGMT):

        client:  + γ τ² KL( softmax(z_T/τ) ‖ softmax(z/τ) ),      z_T = the teacher's logits, the mean over the batch
        server:  teacher ← α · teacher + (1 − α) · w,             with the new w; it starts at the initial weights

    Deviations: none from the authors' code; this part reproduces its recorded runs. Only the abstract of the paper and
    a summary by others were available. There the server adds the mean of the duals of the round's clients. The code
    and `fedgmt` add the mean over all clients.
    """

    stage = "evaluation"
    needs_classes = True

    gamma: float = option(1.0, "weight γ", low=0)
    tau: float = option(3.0, "temperature τ", low=0, open_low=True)
    alpha: float = option(0.95, "share α of the old teacher in the new one", low=0, high=1)

    def first_state(self, weights: Tensor) -> Vectors:
        return {"teacher": weights.clone()}

    def broadcast(self, server: ServerView) -> Vectors:
        return {"teacher": server["teacher"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        weight = self.gamma * self.tau**2
        return rule.with_term(DistillationTerm(sent["teacher"], self.tau, weight)) if weight else rule

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"teacher": torch.lerp(server.arrival(move), server["teacher"], self.alpha)}


@dataclass(frozen=True)
class ModelContrast(Part):
    """Move the features towards those of the global model and away from those of the client's last model (MOON):

        −μ log [ e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + e^{cos(z, z_prev)/τ}) ],      z = the input of the head.

    In a client's first round, its last model is the initial global model.

    Deviations: no projection head, as in the FedSoL authors' code.
    """

    mu: float = option(0.1, "weight μ", low=0)
    tau: float = option(0.5, "temperature τ", low=0, open_low=True)

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"previous": initial}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        term = ContrastTerm(sent["weights"], memory["previous"], self.mu, self.tau)
        return rule.with_term(term) if self.mu else rule

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        return upload, {"previous": sent["weights"] + outcome.delta}


@dataclass(frozen=True)
class ContrastTerm:
    """μ times the contrastive loss against two frozen models."""

    features: ClassVar[bool] = True

    anchor: Tensor
    previous: Tensor
    mu: float
    tau: float

    def __call__(self, here: Pass) -> Tensor:
        z, z_g, z_prev = (f.features for f in (here.forward, here.under(self.anchor), here.under(self.previous)))
        assert z is not None and z_g is not None and z_prev is not None
        similar = torch.stack([F.cosine_similarity(z, z_g), F.cosine_similarity(z, z_prev)], dim=1) / self.tau
        return self.mu * F.cross_entropy(similar, similar.new_zeros(len(z), dtype=torch.long))


@dataclass(frozen=True)
class TopEigenvalue(Part):
    """A direct penalty for the flatness constraint λ₁(∇²ℓ) ≤ τ, for which MAN is a surrogate:

        c · max(0, vᵀ∇²ℓ(w)v − τ),      v → the eigenvector of the algebraically largest eigenvalue λ₁.

    v maximises the Rayleigh quotient: each of the `steps` in a local step takes the best vector of span{v, ∇²ℓ v}, so
    that v does not converge to a large negative eigenvalue. v is kept between the steps of a client's round.

    The gradient of the term needs third derivatives, and every product with ∇²ℓ needs second derivatives. In units of a
    plain step, a local step costs about 11 + 3 · `steps` on the FedAvg-CNN and 5 + 3 · `steps` on an MLP. If λ₁ ≤ τ no
    third derivative is needed, and it costs about 4 + 3 · `steps`. MAN costs a tenth of a step.

    Deviations: the paper states the constrained problem but does not solve it in this way. This part is for comparison.
    """

    weight: float = option(0.01, "weight c of the eigenvalue", low=0)
    steps: int = option(1, "improvements of v in every step", low=1)
    bound: float = option(0.0, "bound τ below which nothing is penalised", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        term = EigenvalueTerm(self.weight, self.steps, self.bound)
        return rule.with_term(term) if self.weight else rule.watching(term)


@dataclass
class EigenvalueTerm:
    """c max(0, vᵀ∇²ℓ v − τ); it stores v for the steps of one client's round."""

    curvature: ClassVar[bool] = True

    weight: float
    steps: int
    bound: float = 0.0
    vector: Tensor | None = field(default=None, init=False)

    @property
    def passes(self) -> int:
        """The additional cost of a step in gradients, as measured by benchmarks/step_cost.py."""
        return 10 + 3 * self.steps

    def __call__(self, here: Pass) -> Tensor:
        parameters = here.slope.network.trained
        gradient = _derivative(here.loss, parameters, create_graph=True)

        def product(vector: Tensor) -> Tensor:
            return _derivative(gradient @ vector, parameters)

        v = _any_direction(gradient) if self.vector is None else self.vector
        image = product(v)
        for _ in range(self.steps):
            v, image = climbed(v, image, product)
        self.vector = v / v.norm()
        curvature = self.vector @ image
        if curvature > self.bound:  # otherwise the third derivative is not needed
            curvature = _derivative(gradient @ self.vector, parameters, create_graph=True) @ self.vector
        here.note("top eigenvalue", curvature)
        excess: Tensor = (curvature - self.bound).clamp(min=0)
        return self.weight * excess


def climbed(v: Tensor, image: Tensor, product: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the unit vector x of span{v, H v} with the largest xᵀH x, and H x; `image` is H v, and ‖v‖ = 1.

    Let r be the normalised component of H v orthogonal to v. Then x = cos φ v + sin φ r diagonalises the 2 × 2 matrix
    of H on that plane:  tan 2φ = 2 rᵀHv / (vᵀHv − rᵀHr).  H x is the same combination of H v and H r, so one product is
    enough.
    """
    along = v @ image
    across = image - along * v
    across -= (across @ v) * v
    length = across.norm()
    if length <= torch.finfo(v.dtype).eps * image.norm():
        return v, image
    r = across / length
    r_image = product(r)
    angle = torch.atan2(2 * (r @ image), along - r @ r_image) / 2
    return angle.cos() * v + angle.sin() * r, angle.cos() * image + angle.sin() * r_image


def _any_direction(like: Tensor) -> Tensor:
    """Return a random unit vector, the same in every round."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=like.dtype).to(like.device)
    return F.normalize(drawn, dim=0)


def _derivative(value: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> Tensor:
    """Return the gradient as one vector, and keep the graph for further gradients."""
    slopes = torch.autograd.grad(
        value, parameters, create_graph=create_graph, retain_graph=True, materialize_grads=True
    )
    return torch.cat([slope.reshape(-1) for slope in slopes])
