"""Runs the command `fedflat` as `python -m fedflat`."""

import fedflat.cli.__main__  # noqa: F401
