"""What can go wrong by a user's hand, each kind with the exit code that the command line ends with."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedflatError(Exception):
    """A mistake that one sentence can name: what is wrong, where, and what to do about it."""

    exit_code = 1


class RecipeError(FedflatError):
    """A recipe, an option or a method that cannot be: wrong name, wrong type, out of range, contradictory."""

    exit_code = 2


class DataError(FedflatError):
    """A data file that is missing, corrupt or not what its name says."""

    exit_code = 3


class SplitError(FedflatError):
    """A partition that these samples and clients do not allow."""

    exit_code = 4


class TrainingError(FedflatError):
    """A round that could not be finished: a client that raised, or numbers that are no longer finite."""

    exit_code = 5


class AwayError(TrainingError):
    """Clients that a measurement needs are not there; training can go on without it."""


class RunError(FedflatError):
    """A run directory that cannot be written or read."""

    exit_code = 6


class StoppedError(FedflatError):
    """A run that was asked to stop by a signal, and has saved what it did; the exit code is the shell's for it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


def nearest(wrong: str, known: Iterable[str]) -> str:
    """A hint that ends an error message about an unknown name.

    >>> nearest("fedsoam", ["fedsam", "fedavg"])
    'did you mean fedsam?'
    >>> nearest("x", ["b", "a"])
    'known: a, b'
    """
    known = sorted(known)
    close = get_close_matches(wrong.lower(), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
