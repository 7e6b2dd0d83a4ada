"""Runs the command `fedflat` as `python -m fedflat.cli`, and so as `python -m fedflat`."""

import sys

from fedflat.cli import main

if not sys.flags.safe_path:
    # Python has put the current directory first in the path, and it may be untrusted: import nothing from there.
    del sys.path[0]
main()
