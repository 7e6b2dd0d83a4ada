"""What every part must keep to: what its class may declare, what its functions return, and that it only reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args

from torch import Tensor

from fedflat.errors import FedflatError, RecipeError
from fedflat.parts.part import Part, Protection, Sight, Stage, Wrapper
from fedflat.parts.uploads import Upload
from fedflat.rule import LocalRule, Vectors

DECLARED = {"stage": get_args(Stage), "sees": get_args(Sight), "protects": get_args(Protection)}
T = TypeVar("T")


def check_declared(part: object) -> None:
    """Refuse what is not a part, or a part whose class declares something that there is not."""
    if not isinstance(part, Part):
        raise RecipeError(f"method: {part!r} is not a part; give instances of subclasses of fedflat.Part")
    for name, values in DECLARED.items():
        if getattr(part, name) not in values:
            known = ", ".join(map(repr, values))
            raise RecipeError(f"method: {type(part).__name__}.{name} = {getattr(part, name)!r}: must be one of {known}")
    if isinstance(part, Wrapper):
        check_declared(part.part)


def called(name: str, function: Callable[[], T], *given: Any) -> T:
    """What a part's function returns on the small example; its mistakes come out as one sentence that names the part.

    Args:
        name: the part's.
        function: the call.
        given: what the call hands to the part, which must not be written to.
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
    """The result, if it is a table of tensors; one called "weights" must have the model's size."""
    if not isinstance(result, Mapping) or not all(isinstance(v, Tensor) for v in result.values()):
        raise RecipeError(f"{_shown(result)} is returned where a table of tensors by their names is due")
    if size is not None and "weights" in result:
        vector(result["weights"], size)
    return dict(result)


def vector(result: object, size: int) -> Tensor:
    """The result, if it is one vector of the model's size."""
    if not isinstance(result, Tensor) or result.shape != (size,):
        raise RecipeError(f"{_shown(result)} is returned where a vector of the model's size is due")
    return result


def rule(result: object) -> LocalRule:
    """The result, if it is a rule."""
    if not isinstance(result, LocalRule):
        raise RecipeError(f"{_shown(result)} is returned where plan's rule is due")
    return result


def reported(result: object, size: int) -> tuple[Upload, Vectors]:
    """The result, if it is an upload with a Δ of the model's size and a table of what the client keeps."""
    upload, memory = _pair(result, "report's upload and memory are")
    if not isinstance(upload, Upload):
        raise RecipeError(f"{_shown(upload)} is returned where report's upload is due")
    vector(upload.delta, size)
    vectors(upload.vectors)
    return upload, vectors(memory)


def merged(result: object, size: int) -> tuple[Tensor, Vectors]:
    """The result, if it is a move and a table of what is new in the state."""
    move, state = _pair(result, "merge's move and state are")
    return vector(move, size), vectors(state)


def _pair(result: object, what: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise RecipeError(f"{_shown(result)} is returned where {what} due")
    return result


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in tables, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, Part):
        yield from _tensors([getattr(value, f.name) for f in fields(value)])
