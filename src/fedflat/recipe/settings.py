"""The recipe's sections for training, evaluation, admission, checkpoints, deployment and the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedflat.recipe.section import Draws, Named, Section

TrackerName = Literal["tensorboard", "mlflow", "wandb"]
Measure = Literal[
    "consistency", "divergence", "discord", "cosine", "proximal", "lambda", "local", "classes", "gradient", "margin",
    "local_sharpness", "local_curvature",
]  # fmt: skip


class Local(Section):
    """A client's work in a round."""

    epochs: int = Field(1, ge=1, description="passes over the client's samples")
    steps: int | None = Field(None, ge=1, description="number of steps instead of epochs")
    batch: int = Field(10, ge=0, description="batch size; 0 = all samples of the client")
    lr: float = Field(0.1, gt=0, description="learning rate η of round 0")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on η for each round")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum β, reset in every round")
    nesterov: bool = Field(False, description="use Nesterov momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    clip: float = Field(0.0, ge=0, description="gradient norm to clip at; 0 = no clipping")
    clip_mode: Literal["loss_only", "official", "all"] = Field("loss_only", description="what is clipped")


class Server(Section):
    """The server's rounds: their number, cohorts and steps."""

    rounds: int = Field(30, ge=1, description="number of rounds")
    stop_loss: float | None = Field(
        None, gt=0, description="stop after the first evaluation whose mean training loss is below this"
    )
    cohort: int | float = Field(0.5, gt=0, description="clients of a round: a count, or a ratio below 1")
    sampling: Literal["uniform", "bernoulli"] = Field(
        "uniform", description="exactly that many clients, or each client with that probability"
    )
    draws: Draws = Field(
        "fedflat", description="how cohorts are drawn: by fedflat, or as in the code of FedSoL, FedSMOO or MAN"
    )
    average: Literal["uniform", "samples"] = Field("samples", description="weights of the average")
    lr: float = Field(1.0, gt=0, description="factor η_g on the server's move")


class Evaluation(Section):
    """When and on what the global model is scored."""

    every: int = Field(1, ge=0, description="rounds between evaluations; 0 = only after the last")
    on: Literal["test", "train", "validation"] = Field("test", description="which samples")
    validation: float = Field(
        0.1, gt=0, lt=1, description='share of each client\'s training samples that on = "validation" holds out'
    )
    model: Literal["server", "active", "all"] = Field(
        "server", description="which model: the server's, the mean of the round's clients, or of all clients' last ones"
    )
    batch: int = Field(500, ge=1, description="samples in a chunk")
    measures: list[Measure] = Field(
        ["consistency"], description="what to measure of each round's local models, as in docs/how-to.md"
    )
    metric: str | None = Field(
        None, description="the task's metric that tables, target and best checkpoint follow; else its first"
    )
    best: Literal["highest", "lowest"] = Field(
        "highest", description="which of its values is the best; set by the task"
    )
    margin: float = Field(1.0, ge=0, description="γ of the measure `margin`")
    radius: float = Field(0.05, gt=0, description="ρ of the measure `local_sharpness`")
    target: float | None = Field(None, description="value of the metric for `rounds to target`")
    sharpness: int = Field(
        0, ge=0, description="rounds between measurements of λ₁ by the clients' Hessian products; 0 = never"
    )
    sharpness_samples: int = Field(1000, ge=0, description="training samples of all clients for λ₁; 0 = all")

    @property
    def part(self) -> Literal["test", "train"]:
        """The part of the federation that is scored; validation samples take the place of the test samples."""
        return "train" if self.on == "train" else "test"


class Admission(Section):
    """Which uploads are merged, and how a round continues without the others."""

    quorum: int = Field(1, ge=1, description="accepted clients below which a round is skipped")
    patience: int = Field(3, ge=1, description="skipped rounds in a row after which the run stops")
    failures: Literal["drop", "stop"] = Field(
        "drop", description="if a client fails or is refused: leave it out of the round, or stop the run"
    )
    deadline: float = Field(0.0, ge=0, description="seconds that a client's local round may take; 0 = no limit")
    max_norm: float = Field(1e6, gt=0, description="largest ‖Δ‖ of a client")
    max_ratio: float = Field(0.0, ge=0, description="largest ‖Δ‖ in units of the cohort's median; 0 = any")
    outlier: float = Field(
        50.0, ge=0, description="largest ‖Δ‖ in units of the cohorts' running median, for a mean client; 0 = any"
    )
    max_samples: int = Field(1_000_000_000, ge=1, description="largest number of samples that a client may claim")
    max_share: float = Field(
        1.0, ge=0, description="samples that count for a client of a deployment, in units of the median; 0 = all"
    )


class Checkpoint(Section):
    """How often a run with a directory is saved, so that a crash loses little."""

    every: int = Field(
        0, ge=0, description="rounds between checkpoints; 0 = as often as costs less than 3 % of the time"
    )
    keep: int = Field(
        0,
        ge=0,
        description="also keep the checkpoint of every n-th round, from round 0 on; 0 = the last two and the best",
    )


class Deployment(Section):
    """Settings of real deployments only (docs/deployment.md)."""

    nodes: int = Field(0, ge=0, description="connected clients to wait for before the first round; 0 = all of them")
    wait: float = Field(600.0, gt=0, description="seconds to wait for them")
    timeout: float = Field(3600.0, gt=0, description="seconds to wait for the replies of a round")
    memory: Literal["refuse", "anew"] = Field(
        "refuse", description="a client whose memory is lost or stale: refuse it, or let it start without memory"
    )
    draws: Literal["secret", "recipe"] = Field(
        "secret", description="cohorts and samples' order by each side's secret, or to rehearse by the recipe's seed"
    )
    outlier: float = Field(
        5.0,
        ge=0,
        description="largest ‖Δ‖ in units of the cohorts' running median, in place of admission.outlier; 0 = any",
    )
    misses: int = Field(3, ge=1, description="rounds in a row without a reply after which a client is asked less often")
    metrics: int = Field(0, ge=0, le=65535, description="port of the server's /metrics for Prometheus; 0 = none")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address of this machine that it listens on")
    log: Literal["text", "json"] = Field("text", description="the server's log: text, or one JSON object per line")


class Engine(Named):
    """Where the clients' local rounds run."""

    name: Literal["auto", "inline", "pool", "ray"] = Field(
        "auto", description="this process, worker processes, or a Ray cluster"
    )
    workers: int = Field(0, ge=0, le=1024, description="worker processes; 0 = one for each core")
    address: str | None = Field(None, description="Ray cluster to join, as in 10.0.0.1:6379; default a local one")
    device: Literal["cpu", "cuda", "mps"] = Field("cpu", description="device on which the clients train")
    group: int = Field(
        0, ge=0, le=1024, description="clients that share a step; 0 = by the model's size, 1 = one by one"
    )
    graph: bool = Field(False, description="take the plain local steps of one client by CUDA graphs; cuda only")
