"""The code in the README and the how-to runs as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!http)([^)#\s]+)\)")


def blocks(file):
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text("utf-8"), re.S)


def test_the_readmes_lines_of_python_run():
    (code,) = blocks("README.md")
    space = {}
    exec(compile(code, "README.md", "exec"), space)
    assert space["result"].accuracy > 0.9


def test_the_how_tos_python_runs_in_order():
    import torch

    x = torch.randn(30, 4)
    space = {"inputs": x, "labels": torch.arange(30) % 7, "test_samples": None}
    first, data, part = blocks("docs/how-to.md")
    exec(compile(first, "how-to", "exec"), space)
    exec(compile(data.replace("test_samples", "samples"), "how-to", "exec"), dict(space))
    exec(compile(part, "how-to", "exec"), space)
    assert len(space["result"].history) == 10


@pytest.mark.parametrize("file", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_every_link_leads_somewhere(file):
    folder = (ROOT / file).parent
    missing = [link for link in LINK.findall((ROOT / file).read_text("utf-8")) if not (folder / link).exists()]
    assert not missing
