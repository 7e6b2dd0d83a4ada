"""An entry of the catalogue: how to build a method, its paper and its idea."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fedflat.methods.chain import Method

Build = TypeVar("Build", bound=Callable[..., Method])

CATALOGUE: dict[str, Entry] = {}


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


def listed(paper: str, idea: str) -> Callable[[Build], Build]:
    """Put the decorated function into the catalogue, under its own name.

    Args:
        paper: A key of `PAPERS`.
        idea: What the method does, in one line.
    """

    def enter(build: Build) -> Build:
        CATALOGUE[build.__name__] = Entry(build, paper, idea)
        return build

    return enter


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
    "Liu et al. 2022": "Towards Efficient and Scalable Sharpness-Aware Minimization, CVPR",
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

# Range and meaning of the options that are not fields of a part.
CHOICES = {
    "around": ("the name of another robust average", "what the means of the buckets go into"),
    "momentum_aware": ("true or false", "divide by the effective number of momentum steps"),
    "form": ("'A0' to 'A6'", "which combination of the paper's Table 6"),
    "source": ("'kl', 'fedprox', 'feddyn', 'scaffold', 'moon' or 'fednova'", "whose gradient gives the perturbation"),
}
