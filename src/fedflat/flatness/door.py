"""Turns any module, data and loss into an `Objective`, and lets functions take either."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.errors import DataError, RecipeError, TrainingError, nearest, shown
from fedflat.federation import Federation, normalised_inputs
from fedflat.flatness.borrowed import borrowed
from fedflat.flatness.objective import Objective
from fedflat.flatness.samples import Collate, Fields, batches_of
from fedflat.local import Loss
from fedflat.models import explained, with_plain_output
from fedflat.tasks import TASKS
from fedflat.tokens import IGNORED

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
    held = normalised_inputs(model) if isinstance(data, Federation) else nullcontext()
    with held, torch.inference_mode(False), torch.enable_grad(), borrowed(model), with_plain_output(model):
        batches = [(_placed(x, like), _placed(y, like)) for x, y in batches_of(data, samples, batch, seed, collate)]
        yield _Explained(model, mean_loss(model, loss, batches[0]), batches)


class _Explained(Objective):
    """An objective whose model or loss may fail on any batch, such as one with a label that is out of range."""

    def _outputs(self, inputs: Tensor) -> Tensor:
        with explained("the model cannot process a batch of", inputs):
            return super()._outputs(inputs)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        with explained("the loss cannot be computed from outputs and labels of", outputs, labels):
            return super()._loss(outputs, labels)


def _placed(entry: Any, like: Tensor | None) -> Any:
    if isinstance(entry, Fields):
        return Fields({name: _placed(tensor, like) for name, tensor in entry.items()})
    if like is None:
        return entry
    if entry.is_inference():  # such a tensor cannot take part in a derivative
        entry = entry.clone()
    if not bool(entry.isfinite().all()):
        raise TrainingError("data: the samples have values that are not finite")
    return entry.to(like.device, like.dtype if entry.is_floating_point() else None)


def mean_loss(model: nn.Module, loss: Loss | None, batch: tuple[Any, Tensor]) -> Loss:
    """Return the loss as a mean over the samples. A few samples, taken once and twice, show how it reduces.

    Args:
        model: the network in evaluation mode.
        loss: the loss of outputs and labels; None takes `default_loss`.
        batch: inputs and labels, of which the first few are used.

    Raises:
        DataError: model or loss cannot be computed, or the loss is neither a mean nor a sum over samples.
        RecipeError: the loss is not a function.
        TrainingError: outputs or loss are not finite, or outputs are random.
    """
    if loss is not None and (not callable(loss) or isinstance(loss, type)):
        kind = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        raise RecipeError(f"loss: is {kind}; give a function of outputs and labels, and options by their name")
    few = FEW if _counts(batch[1][:FEW]) else len(batch[1])
    inputs, labels = batch[0][:few], batch[1][:few]
    with torch.no_grad(), explained("the model cannot process a batch of", inputs):
        outputs, again = model(inputs), model(inputs)
    if not isinstance(outputs, Tensor):
        raise DataError(f"model: returns a {type(outputs).__name__}; wrap it in a module that returns one tensor")
    if not bool(outputs.isfinite().all()):
        raise TrainingError("model: the outputs are not finite; the model has diverged, or the inputs are too large")
    if not torch.equal(outputs, again):
        raise TrainingError("model: two passes differ in evaluation mode, so it is random and has no fixed loss")
    loss = _class_mean(loss or default_loss(outputs, labels))
    with torch.no_grad(), explained("the loss cannot be computed from outputs and labels of", outputs, labels):
        once, twice = loss(outputs, labels), loss(torch.cat([outputs] * 2), torch.cat([labels] * 2))
        if not isinstance(once, Tensor):
            raise DataError(f"loss: returns a {type(once).__name__}; it must return a tensor")
        if once.numel() > 1:
            return _Over(loss, lambda values, y: values.sum() / values.numel())
        value, double = float(once), float(twice)
    if not torch.isfinite(once):
        raise TrainingError(f"loss: is {value} on the first {len(labels)} samples; it must be finite")
    if abs(double - value) <= 1e-4 * abs(value):
        return loss
    if abs(double - 2 * value) <= 1e-4 * abs(value):
        return _Over(loss, lambda total, y: total / len(y))
    raise DataError(f"loss: the same samples twice give {double / value:.3g} × the loss; give a mean over the samples")


@dataclass(frozen=True)
class _Over:
    """A loss that is reduced to a mean. It keeps the given loss, from which `Likelihood` knows the distribution."""

    loss: Loss
    reduce: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.reduce(self.loss(outputs, labels), labels)


class ClassMean:
    """PyTorch's mean over classes, Σ w_y ℓ / Σ w_y, as the mean over all batches together.

    With class weights or ignored labels, the mean of a batch is weighted by the sum of its samples' weights and not by
    their number. `counted` returns this sum, so that the objective does not depend on how the samples are split into
    batches. A batch without a label that counts has the loss 0.
    """

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self.loss = loss

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        classes = labels if labels.is_floating_point() else labels.long()
        value: Tensor = self.loss(outputs, classes) if self.counted(labels) else 0 * outputs.sum()
        return value

    def counted(self, labels: Tensor) -> float:
        if labels.is_floating_point():
            return len(labels)
        there = labels[labels != self.loss.ignore_index].long()
        return there.numel() if self.loss.weight is None else float(self.loss.weight[there].double().sum())


def _class_mean(loss: Loss) -> Loss:
    known = nn.CrossEntropyLoss() if loss is F.cross_entropy else loss
    if isinstance(known, nn.CrossEntropyLoss | nn.NLLLoss) and known.reduction == "mean":
        return ClassMean(known)
    return loss


def _counts(labels: Tensor) -> bool:
    """Whether any label counts, that is, differs from PyTorch's `ignore_index`."""
    return labels.is_floating_point() or bool((labels != IGNORED).any())


def default_loss(outputs: Tensor, labels: Tensor) -> Loss:
    """Cross-entropy for classes of samples or pixels, the mean squared error for floating-point labels.

    Raises:
        DataError: neither fits.
    """
    if labels.is_floating_point() and outputs.shape in (labels.shape, (*labels.shape, 1)):
        return TASKS["regression"].loss
    pixels = outputs.ndim > 3 and labels.shape == (len(outputs), *outputs.shape[2:])
    if not labels.is_floating_point() and (pixels or (labels.ndim == 1 and outputs.ndim == 2)):
        return F.cross_entropy
    shapes = f"outputs of shape {tuple(outputs.shape)} and {labels.dtype} labels of shape {tuple(labels.shape)}"
    raise DataError(f"loss: there is no default for {shapes}; pass loss=, a function of both")


class Door(Protocol, Generic[P, R]):
    """A function that takes a model and data, or an objective or operator in their place."""

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
        model: the network, any nn.Module; it is unchanged afterwards. An `Objective` can replace model and data.
        data: a pair of tensors or arrays, a Dataset, a DataLoader, a list of batches, or a `Federation`.
        loss: maps outputs and labels to a number; by default cross-entropy, or the squared error for real labels.
        samples: maximum number of samples, drawn with the seed; 0 takes all.
        batch: samples in a batch, where the data do not come in batches.
        collate: turns one batch of the data into (inputs, labels).
"""
FIRST = "        objective: the mean loss.\n"


def of_model(measure: Callable[P, R], name: str = "") -> Door[P, R]:
    """Lets a function whose first argument is an objective also take (model, data, loss).

    Everything after the first argument stays an option by keyword. The line about `objective` in the docstring is
    replaced by those about model and data. `name` is the name of the new function, if it is not that of the old one.
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
    title = name or measure.__name__
    signature = inspect.signature(measure)
    _, *own = signature.parameters.values()
    known = {p.name: p.annotation for p in own}

    @wraps(measure)
    def call(model: Any, *args: Any, **options: Any) -> R:
        if not isinstance(model, nn.Module):
            _refuse(title, model)
            _check_options(title, known, options)
            return function(model, *args, **options)
        if len(args) > 2:
            raise RecipeError(f"{title}: after model, data and loss, give options by their name")
        bound = {**dict(zip(("data", "loss"), args, strict=False)), **options}
        given = {name: bound.pop(name) for name in ("loss", "samples", "batch", "collate") if name in bound}
        data, seed = bound.pop("data", None), bound.get("seed", 0)
        _check_options(title, known, bound)
        with objective_of(model, data, **given, seed=seed) as objective:
            return function(objective, **bound)

    first = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    call.__signature__ = signature.replace(parameters=[first, *keywords, *options])  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = title
    call.__doc__ = (measure.__doc__ or "").replace(FIRST, GIVEN)
    return call  # type: ignore[return-value]


KINDS: dict[str, tuple[Any, str]] = {"int": (Integral, "a whole number"), "float": (Real, "a number")}


def _check_options(title: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises an error that names an option that is unknown, or that should be a number and is not.

    `known` maps the names of the options to their annotations, which are types or texts.
    """
    for name, value in options.items():
        if name not in known:
            raise RecipeError(f"{title}: there is no option {name!r}; {nearest(name, known)}")
        annotation = known[name]
        kind, *more = (annotation.__name__ if isinstance(annotation, type) else str(annotation)).split(" | ")
        if kind not in KINDS or (value is None and "None" in more):
            continue
        expected, told = KINDS[kind]
        if not isinstance(value, expected) or value != value:
            raise RecipeError(f"{title}: {name} is {shown(value)}; it must be {told}")
        if name == "seed" and not -(2**63) <= int(value) < 2**63:
            raise RecipeError(f"{title}: seed is {value}; it must fit into 64 bits")


def _refuse(name: str, model: Any) -> None:
    if isinstance(model, Objective) or (hasattr(model, "__matmul__") and hasattr(model, "products")):
        return
    raise RecipeError(f"{name}: the model is a {type(model).__name__}; give an nn.Module and its data")
