"""What may be imported when: a large library that nobody needs yet would delay every command."""

import subprocess
import sys

import pytest

UNUSED = ("sklearn", "scipy", "pandas", "sympy", "matplotlib", "torch._dynamo", "ray", "flwr", "transformers")
EARLY = ("torch", "numpy", "pydantic", *UNUSED)
RUN = ["run", "--out", "run", "--set", "server.rounds=1", "--set", "split.clients=10", "--set", "engine.name=inline"]
COMMAND = """
import sys
from fedflat.cli import main
sys.argv = ["fedflat", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end
"""


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import fedflat", (*EARLY, "rich", "typer", "click")),
        (COMMAND.format(arguments=["--help"]), (*EARLY, "typer.rich_utils", "rich.markdown", "rich.live")),
        (COMMAND.format(arguments=["recipe", "nowhere.toml"]).replace("not end.code", "end.code"), EARLY[:2] + UNUSED),
        (COMMAND.format(arguments=RUN), UNUSED),
    ],
    ids=["import", "help", "mistake", "run"],
)
def test_imports_only_what_is_needed(code, forbidden, tmp_path):
    looked = (
        f"{code}\nimport sys\nfound = [name for name in {forbidden!r} if name in sys.modules]\nassert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", looked], cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-500:]
