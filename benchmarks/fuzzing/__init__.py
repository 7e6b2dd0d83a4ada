"""Cases for benchmarks/fuzz.py and tests/test_fuzz.py: messages and files, spoilt by chance."""

from fuzzing.data_files import DATA_FILES
from fuzzing.files import FILES
from fuzzing.judge import Verdict, judged
from fuzzing.run_files import RUN_FILES
from fuzzing.targets import Target
from fuzzing.wire import WIRE

TARGETS: dict[str, type[Target]] = {**WIRE, **FILES, **DATA_FILES, **RUN_FILES}

__all__ = ["TARGETS", "Target", "Verdict", "judged"]
