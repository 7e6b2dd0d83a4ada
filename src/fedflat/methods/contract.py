"""Checks of the interface of parts: class attributes, return values, and no writes to arguments.

A failed check raises a RecipeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args

from torch import Tensor

from fedflat.errors import FedflatError, RecipeError
from fedflat.local import LocalRule, Vectors
from fedflat.methods.part import Part, Protection, Sight, Stage, Wrapper
from fedflat.methods.uploads import Upload

DECLARED = {"stage": get_args(Stage), "sees": get_args(Sight), "protects": get_args(Protection)}
T = TypeVar("T")


def check_declared(part: object) -> None:
    """Raise a RecipeError if the object is not a part, or if its class has an invalid declaration."""
    if not isinstance(part, Part):
        raise RecipeError(f"method: {part!r} is not a part; give instances of subclasses of fedflat.Part")
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
    before = [tensor._version for tensor in tensors]
    try:
        result = function()
    except FedflatError as error:
        raise RecipeError(f"method: {name}: {error}") from None
    except Exception as error:
        raise RecipeError(
            f"method: {name} fails on a small example, a network of two linear layers with 4 inputs and 3 classes "
            f"({type(error).__name__}: {error}); a part must work with any model"
        ) from error
    if before != [tensor._version for tensor in tensors]:
        raise RecipeError(f"method: {name} writes to a tensor that it was given; make a new one, or clone it first")
    return result


def vectors(result: object, size: int | None = None) -> Vectors:
    """Return the result if it is a dict of tensors; one named "weights" must have the model's size."""
    if not isinstance(result, Mapping) or not all(isinstance(v, Tensor) for v in result.values()):
        raise RecipeError(f"{_shown(result)} is returned where a table of tensors by their names is due")
    if size is not None and "weights" in result:
        vector(result["weights"], size)
    return dict(result)


def vector(result: object, size: int) -> Tensor:
    """Return the result if it is a vector of the model's size."""
    if not isinstance(result, Tensor) or result.shape != (size,):
        raise RecipeError(f"{_shown(result)} is returned where a vector of the model's size is due")
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


def reported(result: object, size: int, known: Vectors) -> tuple[Upload, Vectors]:
    """Return the result if it is an upload with a Δ of the model's size and a dict with the client's memory."""
    upload, kept = _pair(result, "report's upload and memory are")
    if not isinstance(upload, Upload):
        raise RecipeError(f"{_shown(upload)} is returned where report's upload is due")
    vector(upload.delta, size)
    vectors(upload.vectors)
    return upload, _alike(vectors(kept), known, "report", "first_memory")


def merged(result: object, size: int, known: Vectors) -> tuple[Tensor, Vectors]:
    """Return the result if it is a move and a dict with the changed state."""
    move, state = _pair(result, "merge's move and state are")
    return vector(move, size), _alike(vectors(state), known, "merge", "first_state")


def _alike(new: Vectors, known: Vectors, function: str, first: str) -> Vectors:
    """Return the new vectors if they have the same shapes and types as the initial ones."""
    for name in new.keys() & known.keys():
        if (new[name].shape, new[name].dtype) != (known[name].shape, known[name].dtype):
            raise RecipeError(
                f"its {function} returns {name!r} as {_shown(new[name])}, but in {first} it is {_shown(known[name])}"
            )
    return new


def stepped(result: object, size: int, what: str) -> None:
    """Raise a RecipeError unless an ascent or an optimiser returned a vector and a dict with its new state."""
    direction, handed_on = _pair(result, f"the {what}'s vector and table are")
    vector(direction, size)
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
