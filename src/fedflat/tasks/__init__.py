"""Tasks: the loss, the metrics of a model, and the meaning of its outputs."""

from fedflat.tasks.scoring import Accuracy, MeanAveragePrecision, Metric, Perplexity, RSquared, SquaredError
from fedflat.tasks.task import CLASSIFICATION, GIVEN, TASKS, Loss, Task, TokenLoss, counted, find_task

__all__ = [
    "CLASSIFICATION",
    "GIVEN",
    "TASKS",
    "Accuracy",
    "Loss",
    "MeanAveragePrecision",
    "Metric",
    "Perplexity",
    "RSquared",
    "SquaredError",
    "Task",
    "TokenLoss",
    "counted",
    "find_task",
]
