"""Methods that look for flat minima."""

from collections.abc import Callable
from typing import Literal

from fedflat.errors import RecipeError, nearest
from fedflat.methods.catalogue.entry import listed
from fedflat.methods.chain import Method
from fedflat.methods.part import Crowd, Part
from fedflat.methods.parts import (
    AblatedAscent,
    ActivationNorm,
    AdaptiveAscent,
    Ascent,
    ClientMomentum,
    ConsensusAscent,
    ControlVariates,
    Distillation,
    DynamicDual,
    FallingRate,
    InterpolatedAscent,
    LookbackAscent,
    ModelContrast,
    MomentumControls,
    MovingTeacher,
    PrintedConsensus,
    Proximal,
    ProximalAscent,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    SparingAscent,
    TopEigenvalue,
    WeightAveraging,
    WeightedMomentum,
)
from fedflat.methods.parts.proximal import Form, Radius, Scope
from fedflat.methods.parts.terms import Layers

Since = Literal["client", "server"]
Source = Literal["kl", "fedprox", "feddyn", "scaffold", "moon", "fednova"]


@listed("Qu et al. 2022", "sharpness-aware minimisation on the client")
def fedsam(rho: float = 0.1) -> Method:
    return Method(Ascent(rho))


@listed("Liu et al. 2022", "SAM with fewer gradients: in every k-th step, or on a share of the batch")
def looksam(rho: float = 0.1, every: int = 5, fraction: float = 1.0, mix: float = 0.2) -> Method:
    return Method(SparingAscent(rho, every, fraction, mix))


@listed("Caldarola et al. 2022", "adaptive (scale-invariant) SAM on the client")
def fedasam(rho: float = 0.7, eta: float = 0.2, biases: bool = False) -> Method:
    return Method(AdaptiveAscent(rho, eta, biases))


@listed("Qu et al. 2022", "FedCM with SAM")
def mofedsam(rho: float = 0.1, mix: float = 0.1) -> Method:
    return Method(ClientMomentum(mix), Ascent(rho))


@listed("Dai et al. 2023", "SCAFFOLD with SAM")
def fedgamma(rho: float = 0.01) -> Method:
    return Method(ControlVariates(), Ascent(rho))


@listed("Sun et al. 2023a", "FedDyn's dual with SAM")
def fedspeed(rho: float = 0.1, penalty: float = 0.1, dual: Crowd = "all", balanced: bool = False) -> Method:
    return Method(DynamicDual(penalty, dual, balanced), Ascent(rho))


@listed("Sun et al. 2023b", "consistent models and a consistent perturbation")
def fedsmoo(
    rho: float = 0.1,
    penalty: float = 0.1,
    sign: int = -1,
    crowd: Crowd = "active",
    upload: Literal["dual", "less"] = "dual",
) -> Method:
    return Method(DynamicDual(penalty), ConsensusAscent(rho, sign, crowd, upload))


@listed("Sun et al. 2023b", "FedSMOO with the updates that its slides print")
def fedsmoo_slides(rho: float = 0.1, penalty: float = 0.1, alpha: float = 1.0, printed: bool = False) -> Method:
    # The slides have 1/(2α) where the multiplier λᵢ = −h/β requires 1/β, so h changes by β/(2α) times Δ.
    gain = 1 / (2 * alpha * penalty) if printed and alpha > 0 and penalty > 0 else 1.0
    return Method(DynamicDual(penalty, gain=gain), PrintedConsensus(rho, alpha, printed))


@listed("Li et al. 2025", "learn from a moving average of the global models, with a linear dual")
def fedgmt(gamma: float = 1.0, tau: float = 3.0, alpha: float = 0.95, penalty: float = 0.1) -> Method:
    return Method(DynamicDual(penalty, quadratic="none"), MovingTeacher(gamma, tau, alpha))


@listed("Lee et al. 2024", "perturb along a proximal gradient, descend the local loss")
def fedsol(
    rho: float = 2.0,
    radius: Radius = "dim0",
    scope: Scope = "all",
    source: Source = "kl",
    tau: float = 3.0,
    zero: float = 1e-6,
) -> Method:
    return Method(ProximalAscent(_source(source, tau), rho, radius, scope, zero))


@listed("Lee et al. 2024", "FedSoL's Table 6: form A0 to A6")
def fedsol_ablation(
    form: Literal["A0"] | Form = "A1",
    rho: float = 2.0,
    beta: float = 1.0,
    tau: float = 3.0,
    radius: Radius = "dim0",
    scope: Scope = "all",
) -> Method:
    if form == "A0":
        return Method()
    return Method(AblatedAscent(Distillation(tau), rho, radius, scope, form=form, beta=beta))


def _source(name: str, tau: float) -> Part:
    """Return the part whose gradient gives the perturbation.

    FedNova's gradient points from the client's last normalised update to the mean of all clients.
    """
    sources: dict[str, Callable[[], Part]] = {
        "kl": lambda: Distillation(tau),
        "fedprox": Proximal,
        "feddyn": lambda: DynamicDual(direction_only=True),
        "scaffold": lambda: ControlVariates(direction_only=True),
        "fednova": lambda: ControlVariates("momentum", direction_only=True),
        "moon": ModelContrast,
    }
    if name not in sources:
        raise RecipeError(f"fedsol: there is no source {name!r}; {nearest(str(name), sources)}")
    return sources[name]()


@listed("Fan et al. 2024", "perturb against the last global move")
def fedlesam(rho: float = 0.1, direction: Since = "client") -> Method:
    return Method(LookbackAscent(rho, direction))


@listed("Fan et al. 2024", "FedLESAM with FedDyn's dual")
def fedlesam_d(rho: float = 0.1, penalty: float = 0.1, direction: Since = "client") -> Method:
    return Method(DynamicDual(penalty), LookbackAscent(rho, direction))


@listed("Fan et al. 2024", "FedLESAM with SCAFFOLD's correction")
def fedlesam_s(rho: float = 0.1, direction: Since = "client") -> Method:
    return Method(ControlVariates(), LookbackAscent(rho, direction))


@listed("Lee and Yoon 2024", "between local and global perturbation")
def fedgf(rho: float = 0.05, rho_server: float = 0.05, threshold: float = 1.0, window: int = 30) -> Method:
    return Method(InterpolatedAscent(rho, rho_server, threshold, window))


@listed("Caldarola et al. 2025", "SAM on server and clients, with FedDyn's dual")
def fedgloss(rho: float = 0.15, rho_server: float = 0.15, penalty: float = 0.1, ramp: int = 0) -> Method:
    return Method(DynamicDual(penalty), Ascent(rho), ServerAscent(rho_server, ramp=ramp))


@listed("Liu et al. 2025a", "falling rate in a round, a longer server step")
def fedswa(alpha: float = 1.5, floor: float = 0.1) -> Method:
    return Method(FallingRate(floor), ServerStep(alpha))


@listed("Liu et al. 2025a", "FedSWA with control variates that follow a moving average")
def fedmoswa(alpha: float = 1.5, floor: float = 0.1, gamma: float = 0.4) -> Method:
    return Method(FallingRate(floor), MomentumControls(gamma=gamma), ServerStep(alpha))


@listed("Li et al. 2025b", "a client's own momentum, and a perturbation along it")
def fedwmsam(rho: float = 0.01, mix: float = 0.1, rate: float = 0.01, sign: Literal[1, -1] = 1) -> Method:
    return Method(WeightedMomentum(rho, mix, rate, sign))


@listed("Liu et al. 2026", "Nesterov momentum on the server with SAM")
def fednsam(rho: float = 0.05, beta: float = 0.85) -> Method:
    return Method(Ascent(rho), ServerMomentum(beta, lookahead=True))


@listed("Yashwanth et al. 2025", "minimise the activations' norm; added to any method")
def man(zeta: float = 0.15, layers: Layers = "all", attention: bool = False) -> Method:
    return Method(ActivationNorm(zeta, layers, attention))


@listed("Yashwanth et al. 2025", "penalise the Hessian's top eigenvalue itself")
def top_eigenvalue(weight: float = 0.01, steps: int = 1, bound: float = 0.0) -> Method:
    return Method(TopEigenvalue(weight, steps, bound))


@listed("Caldarola et al. 2022", "show the average of the last global models")
def swa(start: int = 10, every: int = 1) -> Method:
    return Method(WeightAveraging(start, every))
