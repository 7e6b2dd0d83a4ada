"""Tasks: the loss to minimise, the metrics that evaluate a model, and the meaning of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.errors import RecipeError, nearest, shown
from fedflat.tasks.scoring import (
    Accuracy,
    MeanAveragePrecision,
    Metric,
    Perplexity,
    RSquared,
    SquaredError,
)
from fedflat.tokens import IGNORED
from fedflat.trusted import named_class

Loss = Callable[[Tensor, Tensor], Tensor]
Made = TypeVar("Made")
Output = Literal["classes", "tokens", "values", "labels"]
# Fields of a round's record, which cannot be names of metrics.
TAKEN = {"round", "loss", "local_loss", "train_loss", "cohort", "bytes_down", "bytes_up", "notes", "refused", "skipped",
         "seconds", "lambda1", "epsilon", "class_accuracy", "name", "method", "seed", "consistency", "divergence",
         "discord", "gradient", "margin", "local_sharpness", "averaged_sharpness", "global_sharpness", "local_lambda1",
         "averaged_lambda1", "flatness_distance", "sharpness_bytes", "sharpness_missing", "scale", "asked"}  # fmt: skip
GIVEN = "given"  # the name of a task that was made in Python and cannot be named in a recipe


@dataclass(frozen=True)
class Task:
    """A loss, the metrics of its models, and the kind of its outputs.

    For your own task in a recipe (`task = "package.module:Name"`), derive a class that sets the three:

        class Median(Task):
            def __init__(self) -> None:
                super().__init__(F.l1_loss, (MeanAbsoluteError,), "values")

    Args:
        loss: maps outputs and labels of a batch to the mean loss over its samples. A loss that averages over something
            else, such as tokens, has a method `counted(labels)` that returns how many there are in a batch.
        metrics: subclasses of `Metric`. Tables, targets and checkpoints follow the first one by default.
        output: what an output is: "classes" the logits of one class, "tokens" those of a class for every token,
            "values" numbers, "labels" the logits of several labels that are each present or not.
        written: how a recipe names the task, if that is more than a name.
    """

    loss: Loss
    metrics: tuple[type[Metric], ...] = (Accuracy,)
    output: Output = "classes"
    written: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise RecipeError(f"task: the loss is {shown(self.loss)}, not a function of outputs and labels")
        if self.output not in get_args(Output):
            hint = nearest(str(self.output), get_args(Output))
            raise RecipeError(f"task: output = {self.output!r} is unknown; {hint}")
        kinds = self.metrics if isinstance(self.metrics, tuple | list) else [None]
        if not all(isinstance(kind, type) and issubclass(kind, Metric) for kind in kinds):
            raise RecipeError("task: metrics must be a tuple of classes that inherit from fedflat.Metric")
        for metric in self.metrics:
            if not isinstance(getattr(metric, "name", None), str):
                raise RecipeError(f'task: metric {metric.__name__} has no name; give it one, as in name = "mae"')
        names = [metric.name for metric in self.metrics]
        if not names:
            raise RecipeError("task: it needs at least one metric")
        for name in names:
            if not name.isidentifier() or name in TAKEN or names.count(name) > 1:
                raise RecipeError(f"task: {name!r} cannot be the name of a metric; take a word of its own")

    @property
    def name(self) -> str:
        """The name by which a recipe finds the task again."""
        if self.written:
            return self.written
        for name, task in TASKS.items():
            if self == task:
                return name
        path = f"{type(self).__module__}:{type(self).__qualname__}"
        return GIVEN if type(self) is Task else path

    def with_loss(self, loss: Loss) -> Task:
        """Return the task with another loss."""
        return Task(loss, self.metrics, self.output)

    def metric(self, name: str | None = None) -> type[Metric]:
        """Return the metric of this name, or the first one.

        Raises:
            RecipeError: the task has no such metric.
        """
        known = {metric.name: metric for metric in self.metrics}
        if name is not None and name not in known:
            raise RecipeError(
                f"evaluation.metric = {name!r}: the task {self.name} does not have it; {nearest(name, known)}"
            )
        return self.metrics[0] if name is None else known[name]

    def check(self, dataset: str, labels: Tensor) -> None:
        """Check that labels are of the task's kind.

        Args:
            dataset: the name of the data set, for the error message.
            labels: the labels of the training samples.

        Raises:
            RecipeError: if they are not.
        """
        floating, each = labels.is_floating_point(), labels.ndim
        wrong = {
            "classes": not floating and each != 1,
            "tokens": floating or each != 2,
            "values": not floating,
            "labels": not floating or each != 2 or bool((labels.min() < 0) | (labels.max() > 1)),
        }[self.output]
        if wrong:
            others = ", ".join(repr(kind) for kind in get_args(Output) if kind != self.output)
            own = "" if self.name in TASKS else f"; its output is {self.output!r}, and others are {others}"
            raise RecipeError(f"task = {self.name!r}: needs {NEEDED[self.output]}, which {dataset} does not have{own}")


NEEDED = {
    "classes": "one class for each sample",
    "tokens": "a row of classes for each sample, one for every token",
    "values": "floating targets",
    "labels": "floating targets of 0 and 1, a row for each sample",
}


@dataclass(frozen=True)
class TokenLoss:
    """The mean cross-entropy over the tokens of a batch that count, for logits (N, T, V) and labels (N, T)."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())

    def counted(self, labels: Tensor) -> int:
        """Return the number of tokens that count."""
        return int((labels != IGNORED).sum())


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of (y − ŷ)² over samples and targets; labels (N,) may have outputs (N, 1)."""
    return F.mse_loss(outputs.reshape(labels.shape), labels)


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples and labels of −[y log σ(z) + (1 − y) log(1 − σ(z))]."""
    return F.binary_cross_entropy_with_logits(outputs, labels)


def counted(loss: Any, labels: Tensor) -> float:
    """Return the number of samples, or other items such as tokens, over which the loss of a batch is the mean."""
    count = getattr(loss, "counted", None)
    return len(labels) if count is None else count(labels)


CLASSIFICATION = Task(F.cross_entropy)
TASKS: dict[str, Task] = {
    "classification": CLASSIFICATION,
    "regression": Task(squared_error, (RSquared, SquaredError), "values"),
    "multi-label": Task(binary_cross_entropy, (MeanAveragePrecision,), "labels"),
    "next-token": Task(TokenLoss(), (Accuracy, Perplexity), "tokens"),
}


def find_task(name: str) -> Task:
    """Return the task of this name, or an instance of the trusted class at `package.module:Name`.

    Options in parentheses set another loss (a trusted subclass of `nn.Module`) and add metrics (trusted subclasses of
    `Metric`), as in `classification(loss=mine:Focal, metric=mine:F1)`.

    Raises:
        RecipeError: there is no such task, or a class is not trusted or not of the right kind.

    >>> find_task("regression").metric().name
    'r2'
    >>> [metric.name for metric in find_task("classification(metric=fedflat.tasks:Perplexity)").metrics]
    ['accuracy', 'perplexity']
    """
    base, opened, inside = name.partition("(")
    task = _named(base.strip())
    if not opened:
        return task
    if not inside.endswith(")"):
        raise RecipeError(f"task = {name!r}: write it like classification(loss=package.module:Loss)")
    loss, metrics = task.loss, list(task.metrics)
    for text in filter(None, (each.strip() for each in inside[:-1].split(","))):
        option, _, path = (each.strip() for each in text.partition("="))
        if option == "loss":
            loss = _made(path, nn.Module, "loss")
        elif option == "metric":
            metrics.append(named_class(path, Metric, "metric"))  # type: ignore[type-abstract]
        else:
            raise RecipeError(f"task = {name!r}: {option!r} is not an option of a task; give loss or metric")
    return Task(loss, tuple(metrics), task.output, written=name)


def _named(name: str) -> Task:
    if name in TASKS:
        return TASKS[name]
    if name == GIVEN:
        raise RecipeError("task = 'given': this task was made in Python; pass it to fedflat.train again")
    if ":" not in name:
        raise RecipeError(f"task = {name!r}: there is no such task; {nearest(name, TASKS)}")
    return _made(name, Task, "task")


def _made(path: str, kind: type[Made], field: str) -> Made:
    """Return an instance of a trusted class, made without arguments."""
    made: Callable[[], Made] = named_class(path, kind, field)
    try:
        return made()
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(f"{field} = {path!r}: could not be made: {error}") from error
