"""Memory and time of several processes that load CIFAR-10, each for itself or, like a sweep's runs, from one copy.

    FEDFLAT_DATA=… python benchmarks/sharing.py [--runs 4]

Every process builds the federation of 100 clients and looks at all samples once. PSS is that of all processes together
when the last one is ready, less that of as many processes that have only imported torch. Prints a Markdown table.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "contenders"))

from processes import pss_mb

from fedflat.federation import DECODED_FOLDER as FOLDER

IMPORT = "import sys, torch, fedflat.federation; torch.set_num_threads(1)"
LOAD = """
federation = fedflat.federation.federate("cifar10", "iid", 100)
data = federation.dataset
total = sum(int(part.inputs.sum()) + int(part.labels.sum()) for part in (data.train, data.test))
"""
WAIT = "print('ready', flush=True); sys.stdin.read()"


def together(runs: int, code: str, folder: str | None) -> tuple[float, float]:
    """MB of that many processes, and the seconds until the last one is ready."""
    surroundings = {key: value for key, value in os.environ.items() if key != FOLDER}
    surroundings |= {FOLDER: folder} if folder else {}
    command = [sys.executable, "-c", "\n".join([IMPORT, code, WAIT])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    begun = time.perf_counter()
    processes = [subprocess.Popen(command, env=surroundings, **pipes) for _ in range(runs)]
    ready = [process.stdout.readline() for process in processes]
    seconds = time.perf_counter() - begun
    used = sum(pss_mb(process.pid) for process in processes)
    for process in processes:
        process.communicate()
    if any(line != b"ready\n" for line in ready):
        sys.exit("a process failed")
    return used, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=4)
    options = parser.parse_args()
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        bare, started = together(options.runs, "", None)
        rows = {"each for itself": together(options.runs, LOAD, None), "shared": together(options.runs, LOAD, folder)}
    print(f"| {options.runs} processes | data, MB | seconds beyond the imports |\n|---|---|---|")
    for name, (used, seconds) in rows.items():
        print(f"| {name} | {used - bare:.0f} | {seconds - started:.1f} |")


if __name__ == "__main__":
    main()
