"""SECURITY.md promises nothing without a test of that name."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
PARTIES = ["A bad server", "A bad client", "A bad file", "A bad network", "Another user of the machine"]


def rows(section):
    """The rows of a section's table: what is promised, and what shows it."""
    body = re.search(rf"^### {section}$(.*?)(?=^##)", TEXT, re.S | re.M)[1]
    table = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")]
    return table[2:]


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_every_named_test_exists(file, test):
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("party", PARTIES)
def test_every_promise_names_its_test_and_every_party_has_limits(party):
    assert rows(party)
    assert not [promise for promise, *shown in rows(party) if not re.search(r"`tests/[\w/]+\.py::test_\w+`", shown[0])]
    assert re.search(rf"^### {party}$(?:(?!^##).)*^Not promised:$", TEXT, re.S | re.M)


def test_nothing_that_looks_like_a_test_escapes_the_check():
    assert len(re.findall(r"::test_", TEXT)) == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", TEXT))


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    assert not [link for link in links if not link.startswith("#") and not (ROOT / link.split("#")[0]).exists()]
    for path, anchor in (link.split("#") for link in links if "#" in link):
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text("utf-8") if path else TEXT, re.M)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
