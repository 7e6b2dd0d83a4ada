"""Checks of the interface of parts: class attributes, return values, and no writes to arguments.

A failed check raises a RecipeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar, get_args

from torch import Tensor

from fedflat.errors import FedflatError, RecipeError
from fedflat.local import LocalRule, Vectors
from fedflat.methods.part import Part, Protection, Sight, Stage, Wrapper
from fedflat.methods.uploads import Upload

DECLARED: dict[str, tuple[object, ...]] = {
    "stage": get_args(Stage),
    "sees": get_args(Sight),
    "protects": get_args(Protection),
    "needs_classes": (False, True),
}
T = TypeVar("T")


def check_declared(part: object) -> None:
    """Raise a RecipeError if the object is not a part, or if its class has an invalid declaration."""
    if not isinstance(part, Part):
        raise RecipeError(f"method: {part!r} is not a part; give instances of subclasses of fedflat.Part")
    for base in type(part).__mro__[: type(part).__mro__.index(Part)]:
        made = "__init__" in vars(base) or any(isinstance(value, Field) for value in vars(base).values())
        if made and "__dataclass_params__" not in vars(base):
            raise RecipeError(f"method: {base.__name__} needs @dataclass(frozen=True) above its class")
    for name, values in DECLARED.items():
        if getattr(part, name) not in values:
            known = ", ".join(map(repr, values))
            raise RecipeError(f"method: {type(part).__name__}.{name} = {getattr(part, name)!r}: must be one of {known}")
    if isinstance(part, Wrapper):
        check_declared(part.part)


def called(name: str, function: Callable[[], T], *given: Any) -> T:
    """Call a function of a part on the small example and return its result.

    Args:
        name: name of the part, for error messages.
        function: the call.
        given: the arguments that the part receives and must not write to.

    Raises:
        RecipeError: the function fails or writes to its arguments; the message names the part.
    """
    tensors = [*_tensors(given)]
    before = [(tensor._version, tensor.clone()) for tensor in tensors]
    try:
        result = function()
    except FedflatError as error:
        raise RecipeError(f"method: {name}: {error}") from None
    except Exception as error:
        raise RecipeError(
            f"method: {name} fails on a small example, a network of two linear layers with 4 inputs and 3 classes "
            f"({type(error).__name__}: {error}); a part must work with any model"
        ) from error
    if any(map(_written, tensors, before)):
        raise RecipeError(f"method: {name} writes to a tensor that it was given; make a new one, or clone it first")
    return result


def _written(tensor: Tensor, before: tuple[int, Tensor]) -> bool:
    """Return whether a tensor was written to; its version does not count writes through NumPy or `.data`."""
    version, values = before
    both_nan = (tensor != tensor) & (values != values)
    return tensor._version != version or not bool(((tensor == values) | both_nan).all())


def kept(name: str, check: Callable[..., T], *given: Any) -> T:
    """Return the checked result of a part's function in a round; one that the example did not show may be wrong.

    Args:
        name: name of the part, for error messages.
        check: the check, one of the functions below.
        given: its arguments, the result first.

    Raises:
        RecipeError: the result is not what the function must return; the message names the part.
    """
    try:
        return check(*given)
    except RecipeError as error:
        raise RecipeError(f"method: {name}: {error}") from None


def vectors(result: object, like: Tensor | None = None) -> Vectors:
    """Return the result if it is a dict of tensors; one named "weights" must be like the model's weights."""
    if not isinstance(result, Mapping) or not all(isinstance(v, Tensor) for v in result.values()):
        raise RecipeError(f"{_shown(result)} is returned where a table of tensors by their names is due")
    if like is not None and "weights" in result:
        vector(result["weights"], like)
    return dict(result)


def vector(result: object, like: Tensor) -> Tensor:
    """Return the result if it is a vector of the size and type of the model's weights."""
    if not isinstance(result, Tensor) or result.shape != like.shape:
        raise RecipeError(f"{_shown(result)} is returned where a vector of the model's size is due")
    if result.dtype != like.dtype:
        raise RecipeError(f"{_shown(result)} is returned where the weights are {_shown(like)}; keep their type")
    return result


def rule(result: object) -> LocalRule:
    """Return the result if it is a rule."""
    if not isinstance(result, LocalRule):
        raise RecipeError(f"{_shown(result)} is returned where plan's rule is due")
    return result


def memory(result: object, weights: Tensor) -> Vectors:
    """Return the result if it is a dict of vectors with the shape and type of the weights, as a memory must be."""
    kept = vectors(result)
    for name, made in kept.items():
        if (made.shape, made.dtype) != (weights.shape, weights.dtype):
            raise RecipeError(
                f"its first_memory makes {name!r} {_shown(made)} where the weights are {_shown(weights)}; what a "
                "client keeps must have their shape and type, as torch.zeros_like(initial) has"
            )
    return kept


def reported(result: object, like: Tensor, known: Vectors) -> tuple[Upload, Vectors]:
    """Return the result if it is an upload with a Δ like the weights and a dict with the client's memory."""
    upload, kept = handed(result)
    vector(upload.delta, like)
    for name, made in vectors(upload.vectors).items():
        if made.dim() != 1:
            raise RecipeError(f"its report uploads {name!r} as {_shown(made)}; only vectors can be uploaded")
    return upload, _alike(kept, known, "report", "first_memory")


def handed(result: object) -> tuple[Upload, Vectors]:
    """Return the result if it is an upload and a dict of tensors; their shapes are left to the admission of a round."""
    upload, kept = _pair(result, "report's upload and memory are")
    if not isinstance(upload, Upload):
        raise RecipeError(f"{_shown(upload)} is returned where report's upload is due")
    return upload, vectors(kept)


def merged(result: object, like: Tensor, known: Vectors) -> tuple[Tensor, Vectors]:
    """Return the result if it is a move and a dict with the changed state."""
    move, state = _pair(result, "merge's move and state are")
    return vector(move, like), _alike(vectors(state), known, "merge", "first_state")


def _alike(new: Vectors, known: Vectors, function: str, first: str) -> Vectors:
    """Return the new vectors if they have the same shapes and types as the initial ones."""
    for name in new.keys() & known.keys():
        if (new[name].shape, new[name].dtype) != (known[name].shape, known[name].dtype):
            raise RecipeError(
                f"its {function} returns {name!r} as {_shown(new[name])}, but in {first} it is {_shown(known[name])}"
            )
    return new


def stepped(result: object, like: Tensor, what: str) -> None:
    """Raise a RecipeError unless an ascent or an optimiser returned a vector and a dict with its new state."""
    direction, handed_on = _pair(result, f"the {what}'s vector and table are")
    vector(direction, like)
    vectors(handed_on)


def _pair(result: object, what: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise RecipeError(f"{_shown(result)} is returned where {what} due")
    return result


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a tensor of shape {tuple(value.shape)} ({str(value.dtype).removeprefix('torch.')})"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, Part):
        yield from _tensors([getattr(value, f.name) for f in fields(value)])
