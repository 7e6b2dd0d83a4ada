"""Time and memory to load a full CIFAR-10 federation, in a fresh process for each file format.

    FEDFLAT_DATA=… python benchmarks/cifar_ready.py

The bound is 3 seconds and 250 MB for the data, in addition to importing torch.
"""

import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from fedflat.federation.places import data_directory


def ready(directory: str) -> dict[str, float]:
    from fedflat import federate

    federate("digits", "iid", 2)  # imports and warms up everything but the files
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    federate("cifar10", "lda", 100, alpha=0.1, directory=directory)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(ready(sys.argv[1])))
        return 0
    packed = data_directory()
    good = True
    with tempfile.TemporaryDirectory() as unpacked:
        target = Path(unpacked) / "cifar10"
        target.mkdir()
        with tarfile.open(packed / "cifar10" / "cifar-10-binary.tar.gz") as archive:
            archive.extractall(target, filter="data")
        for name, directory in (("packed", packed), ("unpacked", unpacked)):
            command = [sys.executable, __file__, str(directory)]
            result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            print(f"{name}: {result['seconds']:.2f} s, {result['MB']:.0f} MB")
            good &= result["seconds"] < 3 and result["MB"] < 250
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
