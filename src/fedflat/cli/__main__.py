"""`python -m fedflat.cli` is the command `fedflat`."""

from fedflat.cli import main

main()
