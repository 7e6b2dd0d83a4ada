"""Averaging, corrections of client drift, server optimisers and personal methods."""

from fedflat.methods.catalogue.entry import listed
from fedflat.methods.chain import Method
from fedflat.methods.part import Crowd
from fedflat.methods.parts import (
    AdaptiveServer,
    ClientMomentum,
    ControlVariates,
    DynamicDual,
    Extrapolation,
    FrozenHead,
    MetaStep,
    ModelContrast,
    NormalisedAveraging,
    NotTrueDistillation,
    Proximal,
    RelaxedStart,
    ServerMomentum,
)
from fedflat.methods.parts.local_work import Pairs


@listed("McMahan et al. 2017", "average the clients' models")
def fedavg() -> Method:
    return Method()


@listed("Li et al. 2020", "stay near the global model")
def fedprox(mu: float = 0.1) -> Method:
    return Method(Proximal(mu))


@listed("Wang et al. 2020", "average normalised updates")
def fednova() -> Method:
    return Method(NormalisedAveraging())


@listed("Karimireddy et al. 2020", "correct the drift by control variates")
def scaffold(momentum_aware: bool = False) -> Method:
    return Method(ControlVariates("momentum" if momentum_aware else "steps"))


@listed("Acar et al. 2021", "dynamic regularisation by a dual of each client")
def feddyn(penalty: float = 0.1, dual: Crowd = "all", balanced: bool = False) -> Method:
    return Method(DynamicDual(penalty, dual, balanced))


@listed("Gao et al. 2022", "FedDyn's drift and SCAFFOLD's correction, by size")
def feddc(penalty: float = 0.01) -> Method:
    return Method(DynamicDual(penalty, balanced=True, quadratic="clipped"), ControlVariates("common", balanced=True))


@listed("Xu et al. 2021", "mix the last global move into local steps")
def fedcm(mix: float = 0.1, momentum_aware: bool = False) -> Method:
    return Method(ClientMomentum(mix, momentum_aware))


@listed("Reddi et al. 2021", "Adam on the server")
def fedadam(
    server_lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.01, v0: float = 1e-4
) -> Method:
    return Method(AdaptiveServer("adam", server_lr, beta1, beta2, tau, v0))


@listed("Reddi et al. 2021", "Yogi on the server")
def fedyogi(
    server_lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.01, v0: float = 1e-4
) -> Method:
    return Method(AdaptiveServer("yogi", server_lr, beta1, beta2, tau, v0))


@listed("Reddi et al. 2021", "Adagrad on the server")
def fedadagrad(server_lr: float = 0.1, beta1: float = 0.0, tau: float = 0.01, v0: float = 1e-4) -> Method:
    return Method(AdaptiveServer("adagrad", server_lr, beta1, 0.0, tau, v0))


@listed("Hsu et al. 2019", "momentum on the server")
def fedavgm(beta: float = 0.9) -> Method:
    return Method(ServerMomentum(beta))


@listed("Jhunjhunwala et al. 2023", "a server step as long as the clients' disagreement allows")
def fedexp(eps: float = 1e-3, average: bool = True) -> Method:
    return Method(Extrapolation(eps, average))


@listed("Sun et al. 2023c", "start each client beyond the global model, away from its last one")
def fedinit(beta: float = 0.1) -> Method:
    return Method(RelaxedStart(beta))


@listed("Lee et al. 2022", "distil the not-true classes of the global model")
def fedntd(beta: float = 1.0, tau: float = 1.0) -> Method:
    return Method(NotTrueDistillation(beta, tau))


@listed("Li et al. 2021", "contrast features with global and last local model")
def moon(mu: float = 0.1, tau: float = 0.5) -> Method:
    return Method(ModelContrast(mu, tau))


@listed("Oh et al. 2022", "train the body only; the head when personalised")
def fedbabu() -> Method:
    return Method(FrozenHead())


@listed("Fallah et al. 2020", "learn a model that one step adapts")
def perfedavg(outer_lr: float = 0.01, shared_momentum: bool = True, pairs: Pairs = "cycle") -> Method:
    return Method(MetaStep(outer_lr, shared_momentum, pairs))
