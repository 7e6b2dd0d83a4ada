"""The way in: any module, data and loss as an `Objective`, and functions that take either."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.errors import DataError, FedflatError, RecipeError, TrainingError
from fedflat.flatness.borrowed import borrowed
from fedflat.flatness.objective import Objective
from fedflat.flatness.samples import Collate, Fields, batches_of
from fedflat.local import Loss

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
FEW = 4  # samples of the pass that checks model and loss


@contextmanager
def objective_of(
    model: nn.Module,
    data: Any,
    loss: Loss | None = None,
    *,
    samples: int = 1000,
    batch: int = 100,
    seed: int = 0,
    collate: Collate | None = None,
) -> Iterator[Objective]:
    """The mean loss of the samples as a function of the model's weights, inside a `with` block.

    The samples go to the device of the model, and floating-point ones to its precision. Afterwards the model is as it
    was: weights, buffers and the training flag of every submodule.

    Args:
        model: the network, which may return a record with `logits`.
        data: the samples, as `batches_of` takes them.
        loss: maps outputs and labels to a number. A sum over the samples, or one value for each, becomes their mean.
            By default cross-entropy for classes and the squared error for labels that are floating-point numbers.
        samples: maximum number of samples; 0 takes all.
        batch: samples in a batch, where the data do not come in batches.
        seed: seed of the draw.
        collate: turns one batch of the data into (inputs, labels).

    Raises:
        DataError: the data cannot be read, or model and loss do not fit them.
        TrainingError: weights, inputs or loss are not finite, or the model is random in evaluation mode.
        RecipeError: the model has no trained parameter.

    >>> with objective_of(nn.Linear(2, 3), (torch.zeros(5, 2), torch.arange(5) % 3)) as f:
    ...     f.samples, f.size
    (5, 9)
    """
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model: is a {type(model).__name__}; give an nn.Module")
    like = next(model.parameters(), None)
    with borrowed(model):
        batches = [(_placed(x, like), _placed(y, like)) for x, y in batches_of(data, samples, batch, seed, collate)]
        yield Objective(model, mean_loss(model, loss, batches[0]), batches)


def _placed(entry: Any, like: Tensor | None) -> Any:
    if isinstance(entry, Fields):
        return Fields({name: _placed(tensor, like) for name, tensor in entry.items()})
    if like is None:
        return entry
    if not bool(entry.isfinite().all()):
        raise TrainingError("data: the samples have values that are not finite")
    return entry.to(like.device, like.dtype if entry.is_floating_point() else None)


def mean_loss(model: nn.Module, loss: Loss | None, batch: tuple[Any, Tensor]) -> Loss:
    """The loss as a mean over the samples, found by comparing a few of them with the same ones twice.

    Raises:
        DataError: model or loss cannot be computed, or the loss is neither a mean nor a sum over samples.
        TrainingError: outputs or loss are not finite, or outputs are random.
    """
    inputs, labels = batch[0][:FEW], batch[1][:FEW]
    with torch.no_grad(), _explained("the model cannot process a batch", inputs):
        outputs, again = model(inputs), model(inputs)
    if not isinstance(outputs, Tensor):
        raise DataError(f"model: returns a {type(outputs).__name__}; wrap it in a module that returns one tensor")
    if not bool(outputs.isfinite().all()):
        raise TrainingError("model: the outputs are not finite; the model has diverged, or the inputs are too large")
    if not torch.equal(outputs, again):
        raise TrainingError("model: two passes differ in evaluation mode, so it is random and has no fixed loss")
    loss = loss or default_loss(outputs, labels)
    with torch.no_grad(), _explained("the loss cannot be computed", outputs, labels):
        once, twice = loss(outputs, labels), loss(torch.cat([outputs] * 2), torch.cat([labels] * 2))
        if once.numel() > 1:
            return _over(loss, lambda values, y: values.sum() / values.numel())
        value, double = float(once), float(twice)
    if not torch.isfinite(once):
        raise TrainingError(f"loss: is {value} on the first {len(labels)} samples; it must be finite")
    if abs(double - value) <= 1e-4 * abs(value):
        return loss
    if abs(double - 2 * value) <= 1e-4 * abs(value):
        return _over(loss, lambda total, y: total / len(y))
    raise DataError(f"loss: the same samples twice give {double / value:.3g} × the loss; give a mean over the samples")


def _over(loss: Loss, reduce: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda outputs, labels: reduce(loss(outputs, labels), labels)


def default_loss(outputs: Tensor, labels: Tensor) -> Loss:
    """Cross-entropy for classes, the mean squared error for floating-point labels of the outputs' shape.

    Raises:
        DataError: neither fits.
    """
    if labels.is_floating_point() and labels.shape == outputs.shape:
        return F.mse_loss
    if labels.ndim == 1 and outputs.ndim == 2 and not labels.is_floating_point():
        return lambda z, y: F.cross_entropy(z, y.long())
    shapes = f"outputs of shape {tuple(outputs.shape)} and {labels.dtype} labels of shape {tuple(labels.shape)}"
    raise DataError(f"loss: there is no default for {shapes}; pass loss=, a function of both")


@contextmanager
def _explained(what: str, *tensors: Any) -> Iterator[None]:
    try:
        yield
    except FedflatError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        shapes = ", ".join(_described(tensor) for tensor in tensors)
        raise DataError(f"{what} of {shapes}: {type(error).__name__}: {reason[0]}") from error


def _described(tensor: Any) -> str:
    if isinstance(tensor, Fields):
        return "; ".join(f"{name}: {_described(each)}" for name, each in tensor.items())
    return f"shape {tuple(tensor.shape)} ({str(tensor.dtype).removeprefix('torch.')})"


class Door(Protocol, Generic[P, R]):
    """A function of a model and data, which also takes what it is computed from."""

    @overload
    def __call__(
        self,
        model: nn.Module,
        data: Any,
        loss: Loss | None = None,
        *,
        samples: int = 1000,
        batch: int = 100,
        collate: Collate | None = None,
        **options: Any,
    ) -> R: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


GIVEN = """\
        model: the network, any nn.Module. It is given back as it was. Instead of model and data, an `Objective`.
        data: a pair of tensors or arrays, a Dataset, a DataLoader, a list of batches, or a `Federation`.
        loss: maps outputs and labels to a number; by default cross-entropy, or the squared error for real labels.
        samples: maximum number of samples, drawn with the seed; 0 takes all.
        batch: samples in a batch, where the data do not come in batches.
        collate: turns one batch of the data into (inputs, labels).
"""
FIRST = "        objective: the mean loss.\n"


def of_model(measure: Callable[P, R]) -> Door[P, R]:
    """Makes a function of an objective one of (model, data, loss) as well. The objective is its first argument.

    Everything after the first argument stays an option by keyword. The line about `objective` in the docstring is
    replaced by those about model and data.
    """
    keywords = [
        inspect.Parameter("data", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        inspect.Parameter("loss", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in (("samples", 1000), ("batch", 100), ("collate", None))
        ),
    ]

    function: Callable[..., R] = measure

    @wraps(measure)
    def call(model: Any, *args: Any, **options: Any) -> R:
        if not isinstance(model, nn.Module):
            _refuse(measure.__name__, model, options)
            return function(model, *args, **options)
        bound = {**dict(zip(("data", "loss"), args, strict=False)), **options}
        given = {name: bound.pop(name) for name in ("loss", "samples", "batch", "collate") if name in bound}
        data, seed = bound.pop("data", None), bound.get("seed", 0)
        with objective_of(model, data, **given, seed=seed) as objective:
            return function(objective, **bound)

    signature = inspect.signature(measure)
    _, *own = signature.parameters.values()
    first = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    call.__signature__ = signature.replace(parameters=[first, *keywords, *options])  # type: ignore[attr-defined]
    call.__doc__ = (measure.__doc__ or "").replace(FIRST, GIVEN)
    return call  # type: ignore[return-value]


def _refuse(name: str, model: Any, options: dict[str, Any]) -> None:
    if isinstance(model, Objective) or (hasattr(model, "__matmul__") and hasattr(model, "products")):
        return
    raise RecipeError(f"{name}: the model is a {type(model).__name__}; give an nn.Module and its data")
