"""The invariant: one sentence or a correct result, in bounded time and memory."""

import resource
import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

from fedflat.errors import FedflatError
from fuzzing.targets import Target

SECONDS = 10  # of CPU that a case may take: another process that has the processor does not make it slow
WAITING = 3600  # seconds of the clock that it may take, for a case that waits for ever
MEMORY = 3 * 2**30  # bytes of address space that a case may add
LONG = 200_000  # characters of a sentence, which may quote a name; the command line shows 4,000


class Verdict(NamedTuple):
    """What came of a case; `fault` is the traceback if the invariant does not hold."""

    outcome: str
    fault: str = ""


class SlowError(BaseException):
    """A case that takes too long; not an Exception, so that no reader can swallow it."""


def judged(target: Target, name: str, seed: int, case: int) -> Verdict:
    """Run one case, which follows from the target's name, the seed and its number."""
    chance = Random(f"{name}/{seed}/{case}")
    try:
        with _bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Verdict(target.case(chance))
    except FedflatError as error:
        if str(error).strip() and len(str(error)) <= LONG:
            return Verdict(type(error).__name__)
        return Verdict("no sentence", repr(error)[:500])
    except SlowError:
        return Verdict("too slow", traceback.format_exc(limit=-6))
    except Exception as error:
        return Verdict(f"crash: {type(error).__name__}", traceback.format_exc(limit=-8))


@contextmanager
def _bounded() -> Iterator[None]:
    """Limit the time and the memory of a case, as far as the system can."""

    def slow(*_: object) -> None:
        raise SlowError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, slow) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WAITING)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
