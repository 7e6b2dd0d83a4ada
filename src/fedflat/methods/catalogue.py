"""The catalogue: each method's name, its chain of parts and its paper.

Where published versions of a method differ, the default follows the paper and the other version is an option; the pages
in docs/methods give the details.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedflat.errors import RecipeError, nearest
from fedflat.methods.chain import Method
from fedflat.methods.part import Crowd, Part, RobustAverage
from fedflat.methods.parts import (
    AblatedAscent,
    ActivationNorm,
    AdaptiveAscent,
    AdaptiveServer,
    Ascent,
    Bucketing,
    CarriedAdamW,
    CarriedMuon,
    CentralPrivacy,
    CentredClipping,
    ClientMomentum,
    ConsensusAscent,
    ControlVariates,
    Distillation,
    DynamicDual,
    Extrapolation,
    FallingRate,
    FrozenHead,
    GeometricMedian,
    InterpolatedAscent,
    Krum,
    LocalAdamW,
    LocalMuon,
    LocalPrivacy,
    LookbackAscent,
    MetaStep,
    ModelContrast,
    MomentumControls,
    MovingTeacher,
    NormalisedAveraging,
    NormBound,
    NotTrueDistillation,
    PrintedConsensus,
    Proximal,
    ProximalAscent,
    RelaxedStart,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    TopEigenvalue,
    TopK,
    TrimmedMean,
    WeightAveraging,
    WeightedMomentum,
)
from fedflat.methods.parts.local_work import Pairs
from fedflat.methods.parts.protection import Entropy
from fedflat.methods.parts.proximal import Form, Radius, Scope
from fedflat.methods.parts.terms import Layers

Since = Literal["client", "server"]
Source = Literal["kl", "fedprox", "feddyn", "scaffold", "moon", "fednova"]


def fedavg() -> Method:
    return Method()


def fedprox(mu: float = 0.1) -> Method:
    return Method(Proximal(mu))


def fednova() -> Method:
    return Method(NormalisedAveraging())


def scaffold(momentum_aware: bool = False) -> Method:
    return Method(ControlVariates("momentum" if momentum_aware else "steps"))


def feddyn(penalty: float = 0.1, dual: Crowd = "all", balanced: bool = False) -> Method:
    return Method(DynamicDual(penalty, dual, balanced))


def feddc(penalty: float = 0.01) -> Method:
    return Method(DynamicDual(penalty, balanced=True, quadratic="clipped"), ControlVariates("common", balanced=True))


def fedcm(mix: float = 0.1, momentum_aware: bool = False) -> Method:
    return Method(ClientMomentum(mix, momentum_aware))


def fedadam(
    server_lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.01, v0: float = 1e-4
) -> Method:
    return Method(AdaptiveServer("adam", server_lr, beta1, beta2, tau, v0))


def fedyogi(
    server_lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.01, v0: float = 1e-4
) -> Method:
    return Method(AdaptiveServer("yogi", server_lr, beta1, beta2, tau, v0))


def fedadagrad(server_lr: float = 0.1, beta1: float = 0.0, tau: float = 0.01, v0: float = 1e-4) -> Method:
    return Method(AdaptiveServer("adagrad", server_lr, beta1, 0.0, tau, v0))


def fedavgm(beta: float = 0.9) -> Method:
    return Method(ServerMomentum(beta))


def fedntd(beta: float = 1.0, tau: float = 1.0) -> Method:
    return Method(NotTrueDistillation(beta, tau))


def moon(mu: float = 0.1, tau: float = 0.5) -> Method:
    return Method(ModelContrast(mu, tau))


def fedsam(rho: float = 0.1) -> Method:
    return Method(Ascent(rho))


def fedasam(rho: float = 0.7, eta: float = 0.2, biases: bool = False) -> Method:
    return Method(AdaptiveAscent(rho, eta, biases))


def mofedsam(rho: float = 0.1, mix: float = 0.1) -> Method:
    return Method(ClientMomentum(mix), Ascent(rho))


def fedgamma(rho: float = 0.01) -> Method:
    return Method(ControlVariates(), Ascent(rho))


def fedspeed(rho: float = 0.1, penalty: float = 0.1, dual: Crowd = "all", balanced: bool = False) -> Method:
    return Method(DynamicDual(penalty, dual, balanced), Ascent(rho))


def fedsmoo(
    rho: float = 0.1,
    penalty: float = 0.1,
    sign: int = -1,
    crowd: Crowd = "active",
    upload: Literal["dual", "less"] = "dual",
) -> Method:
    return Method(DynamicDual(penalty), ConsensusAscent(rho, sign, crowd, upload))


def fedsmoo_slides(rho: float = 0.1, penalty: float = 0.1, alpha: float = 1.0, printed: bool = False) -> Method:
    # The slides have 1/(2α) where the multiplier λᵢ = −h/β requires 1/β, so h changes by β/(2α) times Δ.
    gain = 1 / (2 * alpha * penalty) if printed and alpha > 0 and penalty > 0 else 1.0
    return Method(DynamicDual(penalty, gain=gain), PrintedConsensus(rho, alpha, printed))


def fedgmt(gamma: float = 1.0, tau: float = 3.0, alpha: float = 0.95, penalty: float = 0.1) -> Method:
    return Method(DynamicDual(penalty, quadratic="none"), MovingTeacher(gamma, tau, alpha))


def fedsol(
    rho: float = 2.0,
    radius: Radius = "dim0",
    scope: Scope = "all",
    source: Source = "kl",
    tau: float = 3.0,
    zero: float = 1e-6,
) -> Method:
    return Method(ProximalAscent(_source(source, tau), rho, radius, scope, zero))


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


def fedlesam(rho: float = 0.1, direction: Since = "client") -> Method:
    return Method(LookbackAscent(rho, direction))


def fedlesam_d(rho: float = 0.1, penalty: float = 0.1, direction: Since = "client") -> Method:
    return Method(DynamicDual(penalty), LookbackAscent(rho, direction))


def fedlesam_s(rho: float = 0.1, direction: Since = "client") -> Method:
    return Method(ControlVariates(), LookbackAscent(rho, direction))


def fedgf(rho: float = 0.05, rho_server: float = 0.05, threshold: float = 1.0, window: int = 30) -> Method:
    return Method(InterpolatedAscent(rho, rho_server, threshold, window))


def fedgloss(rho: float = 0.15, rho_server: float = 0.15, penalty: float = 0.1, ramp: int = 0) -> Method:
    return Method(DynamicDual(penalty), Ascent(rho), ServerAscent(rho_server, ramp=ramp))


def fedswa(alpha: float = 1.5, floor: float = 0.1) -> Method:
    return Method(FallingRate(floor), ServerStep(alpha))


def fedmoswa(alpha: float = 1.5, floor: float = 0.1, gamma: float = 0.4) -> Method:
    return Method(FallingRate(floor), MomentumControls(gamma=gamma), ServerStep(alpha))


def fedexp(eps: float = 1e-3, average: bool = True) -> Method:
    return Method(Extrapolation(eps, average))


def fedinit(beta: float = 0.1) -> Method:
    return Method(RelaxedStart(beta))


def fedwmsam(rho: float = 0.01, mix: float = 0.1, rate: float = 0.01, sign: Literal[1, -1] = 1) -> Method:
    return Method(WeightedMomentum(rho, mix, rate, sign))


def fednsam(rho: float = 0.05, beta: float = 0.85) -> Method:
    return Method(Ascent(rho), ServerMomentum(beta, lookahead=True))


def fedbabu() -> Method:
    return Method(FrozenHead())


def perfedavg(outer_lr: float = 0.01, shared_momentum: bool = True, pairs: Pairs = "cycle") -> Method:
    return Method(MetaStep(outer_lr, shared_momentum, pairs))


def man(zeta: float = 0.15, layers: Layers = "all") -> Method:
    return Method(ActivationNorm(zeta, layers))


def top_eigenvalue(weight: float = 0.01, steps: int = 1, bound: float = 0.0) -> Method:
    return Method(TopEigenvalue(weight, steps, bound))


def adamw(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Method:
    return Method(LocalAdamW(beta1, beta2, eps))


def muon(momentum: float = 0.95, steps: int = 5) -> Method:
    return Method(LocalMuon(momentum, steps))


def fedadamw(
    align: float = 0.5, blocks: bool = True, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
) -> Method:
    return Method(CarriedAdamW(align, blocks, beta1, beta2, eps))


def fedmuon(align: float = 0.5, momentum: float = 0.95, steps: int = 5) -> Method:
    return Method(CarriedMuon(align, momentum, steps))


def median() -> Method:
    return Method(TrimmedMean(0.5))


def trimmed_mean(trim: float = 0.1) -> Method:
    return Method(TrimmedMean(trim))


def geometric_median(steps: int = 50) -> Method:
    return Method(GeometricMedian(steps))


def centred_clipping(radius: float = 0.0, steps: int = 3, beta: float = 0.0) -> Method:
    return Method(CentredClipping(radius, steps, beta))


def krum(liars: float = 0.2) -> Method:
    return Method(Krum(liars))


def multi_krum(liars: float = 0.2) -> Method:
    return Method(Krum(liars, several=True))


def norm_bound(factor: float = 1.0) -> Method:
    return Method(NormBound(factor))


def bucketing(
    around: Literal[
        "median", "trimmed_mean", "geometric_median", "centred_clipping", "krum", "multi_krum", "norm_bound"
    ] = "geometric_median",
    size: int = 2,
) -> Method:
    return Method(Bucketing(_inside(around), size))


def _inside(name: str) -> RobustAverage:
    """Return the robust average for the means of the buckets, with default options."""
    builds: list[Callable[[], Method]] = [
        median, trimmed_mean, geometric_median, centred_clipping, krum, multi_krum, norm_bound
    ]  # fmt: skip
    known = {build.__name__: build for build in builds}
    if name not in known:
        raise RecipeError(f"bucketing: there is no robust average {name!r}; {nearest(str(name), known)}")
    (part,) = known[name]().parts
    assert isinstance(part, RobustAverage)
    return part


def central_dp(clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, entropy: Entropy = "recipe") -> Method:
    return Method(CentralPrivacy(clip, noise, delta, entropy))


def local_dp(clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, entropy: Entropy = "recipe") -> Method:
    return Method(LocalPrivacy(clip, noise, delta, entropy))


def top_k(share: float = 0.1, feedback: bool = False) -> Method:
    return Method(TopK(share, feedback))


def dp_fedsam(
    rho: float = 0.5,
    share: float = 0.4,
    clip: float = 0.2,
    noise: float = 0.13,
    delta: float = 1e-5,
    entropy: Entropy = "recipe",
) -> Method:
    return Method(Ascent(rho), TopK(share), LocalPrivacy(clip, noise, delta, entropy))


def swa(start: int = 10, every: int = 1) -> Method:
    return Method(WeightAveraging(start, every))


@dataclass(frozen=True)
class Entry:
    """An entry of the catalogue."""

    build: Callable[..., Method]
    paper: str
    idea: str

    @property
    def title(self) -> str:
        """The title and venue of the paper."""
        return PAPERS[self.paper]

    def options(self) -> dict[str, Any]:
        """Return the options with their defaults."""
        return {name: p.default for name, p in inspect.signature(self.build).parameters.items()}


PAPERS = {
    "McMahan et al. 2017": "Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS",
    "Li et al. 2020": "Federated Optimization in Heterogeneous Networks, MLSys",
    "Wang et al. 2020": "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS",
    "Karimireddy et al. 2020": "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML",
    "Acar et al. 2021": "Federated Learning Based on Dynamic Regularization, ICLR",
    "Gao et al. 2022": "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction, CVPR",
    "Xu et al. 2021": "FedCM: Federated Learning with Client-level Momentum, arXiv",
    "Reddi et al. 2021": "Adaptive Federated Optimization, ICLR",
    "Hsu et al. 2019": "Measuring the Effects of Non-Identical Data Distribution, arXiv 1909.06335",
    "Lee et al. 2022": "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS",
    "Li et al. 2021": "Model-Contrastive Federated Learning, CVPR",
    "Qu et al. 2022": "Generalized Federated Learning via Sharpness Aware Minimization, ICML",
    "Caldarola et al. 2022": "Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV",
    "Dai et al. 2023": "FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization, TNNLS",
    "Sun et al. 2023a": "FedSpeed: Larger Local Interval, Less Communication Round, …, ICLR",
    "Sun et al. 2023b": "Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML",
    "Li et al. 2025": "One Arrow, Two Hawks: Sharpness-aware Minimization for FL via Global Model Trajectory, ICML",
    "Lee et al. 2024": "FedSoL: Bridging Global Alignment and Local Generality in Federated Learning, CVPR",
    "Fan et al. 2024": "Locally Estimated Global Perturbations are Better than Local Perturbations, ICML",
    "Lee and Yoon 2024": "Rethinking the Flat Minima Searching in Federated Learning, ICML",
    "Caldarola et al. 2025": "Beyond Local Sharpness: Communication-Efficient Global Sharpness-Aware …, CVPR",
    "Liu et al. 2025a": "Momentum-Based Stochastic Controlled Weight Averaging, ICML",
    "Jhunjhunwala et al. 2023": "FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR",
    "Sun et al. 2023c": "Understanding How Consistency Works in FL via Stage-wise Relaxed Initialization, NeurIPS",
    "Li et al. 2025b": "A Fast and Flat Federated Learning Method via Weighted Momentum and SAM, NeurIPS",
    "Liu et al. 2025b": "FedAdamW: A Communication-Efficient Optimizer … for Federated Large Models, arXiv 2510.27486",
    "Liu et al. 2025c": "FedMuon: Accelerating Federated Learning with Matrix Orthogonalization, arXiv 2510.27403",
    "Shi et al. 2023": "Make Landscape Flatter in Differentially Private Federated Learning, CVPR",
    "Stich et al. 2018": "Sparsified SGD with Memory, NeurIPS",
    "Liu et al. 2026": "FedNSAM: Consistency of Local and Global Flatness for Federated Learning, arXiv 2602.23827",
    "Oh et al. 2022": "FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR",
    "Fallah et al. 2020": "Personalized Federated Learning with Theoretical Guarantees, NeurIPS",
    "Loshchilov and Hutter 2019": "Decoupled Weight Decay Regularization, ICLR",
    "Jordan et al. 2024": "Muon: An optimizer for hidden layers in neural networks, released code",
    "Yin et al. 2018": "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML",
    "Pillutla et al. 2022": "Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing",
    "Karimireddy et al. 2021": "Learning from History for Byzantine Robust Optimization, ICML",
    "Blanchard et al. 2017": "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS",
    "Sun et al. 2019": "Can You Really Backdoor Federated Learning?, arXiv 1911.07963",
    "Karimireddy et al. 2022": "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR",
    "McMahan et al. 2018": "Learning Differentially Private Recurrent Language Models, ICLR",
    "Wei et al. 2020": "Federated Learning with Differential Privacy: Algorithms and Performance Analysis, IEEE TIFS",
    "Yashwanth et al. 2025": "Minimizing Layerwise Activation Norm Improves Generalization, arXiv 2512.08314",
}

CATALOGUE: dict[str, Entry] = {
    "fedavg": Entry(fedavg, "McMahan et al. 2017", "average the clients' models"),
    "fedprox": Entry(fedprox, "Li et al. 2020", "stay near the global model"),
    "fednova": Entry(fednova, "Wang et al. 2020", "average normalised updates"),
    "scaffold": Entry(scaffold, "Karimireddy et al. 2020", "correct the drift by control variates"),
    "feddyn": Entry(feddyn, "Acar et al. 2021", "dynamic regularisation by a dual of each client"),
    "feddc": Entry(feddc, "Gao et al. 2022", "FedDyn's drift and SCAFFOLD's correction, by size"),
    "fedcm": Entry(fedcm, "Xu et al. 2021", "mix the last global move into local steps"),
    "fedadam": Entry(fedadam, "Reddi et al. 2021", "Adam on the server"),
    "fedyogi": Entry(fedyogi, "Reddi et al. 2021", "Yogi on the server"),
    "fedadagrad": Entry(fedadagrad, "Reddi et al. 2021", "Adagrad on the server"),
    "fedavgm": Entry(fedavgm, "Hsu et al. 2019", "momentum on the server"),
    "fedntd": Entry(fedntd, "Lee et al. 2022", "distil the not-true classes of the global model"),
    "moon": Entry(moon, "Li et al. 2021", "contrast features with global and last local model"),
    "fedsam": Entry(fedsam, "Qu et al. 2022", "sharpness-aware minimisation on the client"),
    "fedasam": Entry(fedasam, "Caldarola et al. 2022", "adaptive (scale-invariant) SAM on the client"),
    "mofedsam": Entry(mofedsam, "Qu et al. 2022", "FedCM with SAM"),
    "fedgamma": Entry(fedgamma, "Dai et al. 2023", "SCAFFOLD with SAM"),
    "fedspeed": Entry(fedspeed, "Sun et al. 2023a", "FedDyn's dual with SAM"),
    "fedsmoo": Entry(fedsmoo, "Sun et al. 2023b", "consistent models and a consistent perturbation"),
    "fedsmoo_slides": Entry(fedsmoo_slides, "Sun et al. 2023b", "FedSMOO with the updates that its slides print"),
    "fedgmt": Entry(fedgmt, "Li et al. 2025", "learn from a moving average of the global models, with a linear dual"),
    "fedsol": Entry(fedsol, "Lee et al. 2024", "perturb along a proximal gradient, descend the local loss"),
    "fedsol_ablation": Entry(fedsol_ablation, "Lee et al. 2024", "FedSoL's Table 6: form A0 to A6"),
    "fedlesam": Entry(fedlesam, "Fan et al. 2024", "perturb against the last global move"),
    "fedlesam_d": Entry(fedlesam_d, "Fan et al. 2024", "FedLESAM with FedDyn's dual"),
    "fedlesam_s": Entry(fedlesam_s, "Fan et al. 2024", "FedLESAM with SCAFFOLD's correction"),
    "fedgf": Entry(fedgf, "Lee and Yoon 2024", "between local and global perturbation"),
    "fedgloss": Entry(fedgloss, "Caldarola et al. 2025", "SAM on server and clients, with FedDyn's dual"),
    "fedswa": Entry(fedswa, "Liu et al. 2025a", "falling rate in a round, a longer server step"),
    "fedmoswa": Entry(fedmoswa, "Liu et al. 2025a", "FedSWA with control variates that follow a moving average"),
    "fedexp": Entry(fedexp, "Jhunjhunwala et al. 2023", "a server step as long as the clients' disagreement allows"),
    "fedinit": Entry(fedinit, "Sun et al. 2023c", "start each client beyond the global model, away from its last one"),
    "fedwmsam": Entry(fedwmsam, "Li et al. 2025b", "a client's own momentum, and a perturbation along it"),
    "fednsam": Entry(fednsam, "Liu et al. 2026", "Nesterov momentum on the server with SAM"),
    "fedbabu": Entry(fedbabu, "Oh et al. 2022", "train the body only; the head when personalised"),
    "perfedavg": Entry(perfedavg, "Fallah et al. 2020", "learn a model that one step adapts"),
    "man": Entry(man, "Yashwanth et al. 2025", "minimise the activations' norm; added to any method"),
    "top_eigenvalue": Entry(top_eigenvalue, "Yashwanth et al. 2025", "penalise the Hessian's top eigenvalue itself"),
    "adamw": Entry(adamw, "Loshchilov and Hutter 2019", "AdamW as the clients' optimiser; added to most methods"),
    "muon": Entry(muon, "Jordan et al. 2024", "Muon as the clients' optimiser; added to most methods"),
    "fedadamw": Entry(
        fedadamw, "Liu et al. 2025b", "local AdamW with shared second moments and the last global update"
    ),
    "fedmuon": Entry(fedmuon, "Liu et al. 2025c", "local Muon with shared momenta and the last global update"),
    "median": Entry(median, "Yin et al. 2018", "the median of each coordinate; added to any method"),
    "trimmed_mean": Entry(trimmed_mean, "Yin et al. 2018", "the mean without the ends; added to any method"),
    "geometric_median": Entry(geometric_median, "Pillutla et al. 2022", "the geometric median; added to any method"),
    "centred_clipping": Entry(
        centred_clipping, "Karimireddy et al. 2021", "distances from the last move, clipped; added to any method"
    ),
    "krum": Entry(krum, "Blanchard et al. 2017", "the client nearest to its neighbours; added to any method"),
    "multi_krum": Entry(multi_krum, "Blanchard et al. 2017", "the mean of such clients; added to any method"),
    "norm_bound": Entry(norm_bound, "Sun et al. 2019", "the mean of updates cut to one length; added to any method"),
    "bucketing": Entry(
        bucketing, "Karimireddy et al. 2022", "a robust average of means over a few clients each; added to any method"
    ),
    "central_dp": Entry(central_dp, "McMahan et al. 2018", "a trusted server adds noise; added to most methods"),
    "local_dp": Entry(local_dp, "Wei et al. 2020", "the clients add noise; added to most methods"),
    "top_k": Entry(top_k, "Stich et al. 2018", "upload the largest entries only; added to any method"),
    "dp_fedsam": Entry(dp_fedsam, "Shi et al. 2023", "SAM, sparse updates, and noise of the clients"),
    "swa": Entry(swa, "Caldarola et al. 2022", "show the average of the last global models"),
}

# Range and meaning of the options that are not fields of a part.
CHOICES = {
    "around": ("the name of another robust average", "what the means of the buckets go into"),
    "momentum_aware": ("true or false", "divide by the effective number of momentum steps"),
    "form": ("'A0' to 'A6'", "which combination of the paper's Table 6"),
    "source": ("'kl', 'fedprox', 'feddyn', 'scaffold', 'moon' or 'fednova'", "whose gradient gives the perturbation"),
}
