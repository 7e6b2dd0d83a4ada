"""What every target has in common."""

from pathlib import Path
from random import Random
from typing import Protocol


class Target(Protocol):
    """Something that reads what others wrote. It is made once, in an empty folder; then come the cases."""

    share: float  # of all cases: fewer where a case takes more than a few milliseconds

    def __init__(self, folder: Path) -> None: ...

    def case(self, chance: Random) -> str:
        """Spoil something and have it read.

        Returns:
            What came of it, in a word or two: "result", or how it was refused.

        Raises:
            FedflatError: one sentence.
            AssertionError: a result that is wrong.
        """
        ...
