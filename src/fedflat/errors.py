"""User-facing errors, each with the exit code of the command line."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


class FedflatError(Exception):
    """Base class of user errors: one sentence says what is wrong, where, and what to do about it."""

    exit_code = 1


class RecipeError(FedflatError):
    """An invalid recipe, option or method: wrong name, wrong type, out of range, contradictory."""

    exit_code = 2


class DataError(FedflatError):
    """A data file that is missing, corrupt or not what its name says."""

    exit_code = 3


class SplitError(FedflatError):
    """A partition that is impossible with these samples and clients."""

    exit_code = 4


class TrainingError(FedflatError):
    """A round that could not be finished: a client raised, or numbers are no longer finite."""

    exit_code = 5


class AwayError(TrainingError):
    """Clients that a measurement needs are not connected; training can continue without it."""


class RunError(FedflatError):
    """A run directory that cannot be written or read."""

    exit_code = 6


class StoppedError(FedflatError):
    """A run that was stopped by a signal and has saved its progress; the exit code follows the shell's convention."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


def nearest(wrong: str, known: Iterable[str]) -> str:
    """Return a hint that ends an error message about an unknown name.

    >>> nearest("fedsoam", ["fedsam", "fedavg"])
    'did you mean fedsam?'
    >>> nearest("x", ["b", "a"])
    'known: a, b'
    """
    known = sorted(known)
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(wrong.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[close[0]]}?" if close else f"known: {', '.join(known)}"


def shortened(value: object, most: int = 80) -> str:
    """Shorten a value for an error message.

    >>> shortened("x" * 100, most=5)
    'xxxxx… (100 characters)'
    """
    text = hex(value) if isinstance(value, int) else str(value)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def printable(text: object, most: int = 300) -> str:
    r"""Format an untrusted text as one short line without control characters, safe for terminals and logs.

    >>> printable("\x1b[2Jgone\nand more"), printable("long" * 9, most=8)
    ('�[2Jgone and more', 'longlon…')
    """
    try:
        line = str(text)
    except ValueError:  # an integer with more digits than Python converts
        line = f"a number of {text.bit_length()} bits" if isinstance(text, int) else type(text).__name__
    start = " ".join(line[: 4 * most].split())
    cut = start if len(start) <= most and len(line) <= 4 * most else f"{start[: most - 1]}…"
    return "".join(c if c.isprintable() else "�" for c in cut)


def visible(text: str) -> str:
    r"""Replace control characters other than line breaks, at any length.

    >>> visible("one\n\x1b[2Jtwo")
    'one\n�[2Jtwo'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def literal(text: str) -> str:
    """Quote a text that a spreadsheet would read as a formula when it opens a CSV file; numbers stay as they are.

    >>> literal("=HYPERLINK(1)"), literal("-0.5"), literal("+1.2 ± 0.3"), literal("fedavg")
    ("'=HYPERLINK(1)", '-0.5', '+1.2 ± 0.3', 'fedavg')
    """
    begins = text.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"))
    return f"'{text}" if begins and not re.fullmatch(r"[-+](inf|nan|[\d.e ±%*+-]*)", text) else text


def shown(value: object, most: int = 60) -> str:
    """Format an untrusted value for a message.

    >>> shown("many"), shown(7), shown(None)
    ("'many'", '7', 'None')
    """
    return printable(value if isinstance(value, int) else repr(value), most)
