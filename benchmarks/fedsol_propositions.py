"""FedSoL's Propositions 1 and 2 on a trained network: what they predict of a step, and what the step does.

    FEDFLAT_DATA=… python benchmarks/fedsol_propositions.py [--out propositions.png]

f is a client's local loss and L_p its proximal loss KL(softmax(z_g/3) ‖ softmax(z/3)), both over all of its samples;
g_l = ∇f and g_p = ∇L_p at the weights w that a round of local training led to; ĝ_p = g_p/‖g_p‖, H = ∇²f(w). One step of
FedSoL goes to w − γ g_u with g_u = ∇f(w + ρ ĝ_p). Then, up to the remainders in brackets,

    1.  L_p(w − γ g_u) − L_p(w)  ≈  −γ (⟨g_l, g_p⟩ + ρ ĝ_pᵀ H g_p)                                   [O(γρ²) + O(γ²)]
    2.  f(w − γ g_u) − f(w)      ≈  f(w̃ − γ ∇f(w̃)) − f(w̃),  FedAvg's step at w̃ = w + ρ/2 ĝ_p        [O(γρ²) + O(γ²ρ)]

The second is the paper's Eq. 9 as its proof has it: ρ/2 ĝ_p, where the statement has one ρ too many. Fashion-MNIST, 100
clients (LDA 0.1), ten rounds of FedAvg, then the means over the first five clients, in double precision. The MLP has
GELU, since Taylor needs a smooth f; ReLU is shown beside it. Exits 1 if with GELU, at the smallest ρ, a proposition is
more than 5 % off (the first in what ρ adds, for the whole passes through zero), or an order is not 2 ± 0.2.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat import Federation, federate, models, train
from fedflat.drawing import new_figure, save_figure
from fedflat.federation import take_normalised
from fedflat.flatness import Objective
from fedflat.methods.parts.terms import divergence

RADII = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0)
GAMMA, TINY = 1e-3, 1e-6
LOCAL = dict(epochs=1, batch=50, lr=0.1, precision="float64", engine="inline")


def change(objective: Objective, weights: Tensor, step: Tensor) -> float:
    """By how much a step changes the objective."""
    with objective.at(weights):
        before = objective.value()
    with objective.at(weights + step):
        return objective.value() - before


def slope(objective: Objective, weights: Tensor) -> Tensor:
    with objective.at(weights):
        return objective.gradient()


@dataclass(frozen=True)
class Step:
    """One step of FedSoL: the changes of both losses divided by γ, and cos(g_u, g_p)."""

    rho: float
    cosine: float
    predicted: float
    proximal: float
    local: float
    fedavg: float


class Propositions:
    """Both sides of both propositions for one client, at the weights w where the module of f and L_p stands."""

    def __init__(self, f: Objective, proximal: Objective) -> None:
        self.f, self.proximal, self.w = f, proximal, f.weights
        self.g_l, self.g_p = f.gradient(), proximal.gradient()
        self.towards = self.g_p / self.g_p.norm()
        self.bend = f.product(self.towards)

    @property
    def curvature(self) -> float:
        """ĝ_pᵀ H ĝ_p; Proposition 1 counts on its being positive, which a convex f would guarantee."""
        return float(self.towards @ self.bend)

    def step(self, rho: float, gamma: float) -> Step:
        f, w, middle = self.f, self.w, self.w + rho / 2 * self.towards
        g_u = slope(f, w + rho * self.towards)
        return Step(
            rho,
            cosine=float(F.cosine_similarity(g_u, self.g_p, dim=0)),
            predicted=-float(self.g_l @ self.g_p + rho * self.g_p @ self.bend),
            proximal=change(self.proximal, w, -gamma * g_u) / gamma,
            local=change(f, w, -gamma * g_u) / gamma,
            fedavg=change(f, middle, -gamma * slope(f, middle)) / gamma,
        )

    def deviations(self, rho: float, gamma: float) -> Tensor:
        """|left − right| of each proposition."""
        step = self.step(rho, gamma)
        gaps = (step.proximal - step.predicted, step.local - step.fedavg)
        return gamma * torch.tensor(gaps, dtype=torch.float64).abs()


def visit(activation: type[nn.Module], federation: Federation) -> tuple[float, list[Propositions]]:
    """Ten rounds of FedAvg, then a round of some clients: the global model's accuracy, and the propositions there."""
    module = models.build("mlp", federation.dataset.shape, 10)
    module.relu1, module.relu2 = activation(), activation()
    result = train(federation, module, "fedavg", rounds=10, cohort=10, **LOCAL)
    each = [replace(federation, shards=(shard,)) for shard in federation.shards[:5]]
    return result.accuracy, [propositions(alone, take_normalised(result.model)) for alone in each]


def propositions(alone: Federation, everyone: nn.Module) -> Propositions:
    """The propositions where the only client of `alone` gets to in a round, from the global model."""
    module = take_normalised(train(alone, everyone, "fedavg", rounds=1, cohort=1, **LOCAL).model)
    inputs, labels = alone.to(torch.float64).batch(alone.shards[0], None)
    with torch.no_grad():
        answers = everyone(inputs)
    f = Objective(module, F.cross_entropy, [(inputs, labels)])
    return Propositions(f, Objective(module, lambda ours, theirs: divergence(theirs, ours, 3.0), [(inputs, answers)]))


def mean(steps: Iterable[Step]) -> Step:
    return Step(*map(fmean, zip(*map(astuple, steps), strict=True)))


def orders(clients: list[Propositions]) -> dict[str, float]:
    """In which power of γ, at ρ = 0, and of ρ, where γ is too small to count, the clients' deviations fall."""

    def total(rho: float, gamma: float) -> Tensor:
        return torch.stack([client.deviations(rho, gamma) for client in clients]).sum(0)

    in_gamma = torch.log2(total(0.0, GAMMA) / total(0.0, GAMMA / 2))
    in_rho = torch.log2(total(RADII[1], TINY) / total(RADII[1] / 2, TINY))
    return {"1 in γ": float(in_gamma[0]), "1 in ρ": float(in_rho[0]), "2 in ρ": float(in_rho[1])}


def draw(steps: list[Step], path: Path) -> None:
    """Prediction and truth against ρ, for both propositions, and the angle."""
    figure = new_figure(11, 3.2)
    panels = {
        "1: change of L_p ÷ γ": {"predicted": "predicted", "FedSoL's step": "proximal"},
        "2: change of f ÷ γ": {"FedAvg's step at w + ρ/2 ĝ": "fedavg", "FedSoL's step at w": "local"},
        "cos(g_u, g_p)": {"": "cosine"},
    }
    for axes, (title, lines) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for (label, name), style in zip(lines.items(), ("--", "-")[-len(lines) :], strict=True):
            axes.plot([s.rho for s in steps], [getattr(s, name) for s in steps], style, marker=".", label=label)
        axes.set_xscale("symlog", linthresh=RADII[1])
        axes.set(title=title, xlabel="ρ")
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(frameon=False)
    save_figure(figure, path)


def show(steps: list[Step]) -> None:
    print("| ρ | cos(g_u, g_p) | ΔL_p ÷ γ predicted | actual | Δf ÷ γ FedAvg at w + ρ/2 ĝ_p | FedSoL at w |")
    print("|---|---|---|---|---|---|")
    for s in steps:
        changes = (s.predicted, s.proximal, s.fedavg, s.local)
        print(f"| {s.rho:g} | {s.cosine:+.3f} | " + " | ".join(f"{c:+.4f}" for c in changes) + " |")


def errors(still: Step, moved: Step) -> tuple[float, float]:
    """How far the propositions are off: the first in what ρ adds to FedAvg's change, the second in the whole change."""
    added = (moved.proximal - still.proximal) / (moved.predicted - still.predicted)
    return abs(added - 1), abs(moved.local / moved.fedavg - 1)


def report(activation: type[nn.Module], federation: Federation, picture: Path | None) -> bool:
    """Print what came out with this activation; whether the propositions hold as a smooth f wants it."""
    accuracy, clients = visit(activation, federation)
    steps = [mean(client.step(rho, GAMMA) for client in clients) for rho in RADII]
    off, powers = errors(*steps[:2]), orders(clients)
    curvatures = ", ".join(f"{client.curvature:.2f}" for client in clients)
    print(f"\n**{activation.__name__}**: accuracy {accuracy:.3f}, γ = {GAMMA:g}, the clients' ĝ_pᵀHĝ_p: {curvatures}\n")
    show(steps)
    print(f"\nAt ρ = {RADII[1]:g} Proposition 1 is {off[0]:.2%} off, 2 is {off[1]:.2%} off. ", end="")
    print("Orders:", ", ".join(f"{name} {power:.2f}" for name, power in powers.items()), flush=True)
    if picture:
        draw(steps, picture)
    return max(off) <= 0.05 and all(abs(power - 2) <= 0.2 for power in powers.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to draw the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    federation = federate("fashion-mnist", "lda", 100, alpha=0.1)
    kept = report(nn.GELU, federation, options.out)
    report(nn.ReLU, federation, None)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
