"""What the documentation site is made of: its navigation, its equations, its link check, the version."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import fedflat

pytest.importorskip("markdown", reason="pip install 'fedflat[docs]'")

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "docsite" / "zensical.toml").read_text("utf-8")))
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    pages |= {f"tutorials/{p.stem}.md" for p in (ROOT / "docs" / "tutorials").glob("*.ipynb")}
    pages |= {"changelog.md", "contributing.md", "security.md"}
    assert listed == {p for p in pages if not p.startswith("methods/")} | {"methods/README.md"}


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1]
    assert fedflat.__version__ == project == cited == newest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hᵢ ← hᵢ + 2", "<msub><mi>h</mi><mrow><mi>i</mi></mrow></msub>"),
        ("wᵗ⁺¹", "<msup><mi>w</mi><mrow><mi>t</mi>"),
        ("m̂/(√v̂ + ε)", "<mfrac><mrow><mover"),
        ("ρ q/‖q‖", '<mi>ρ</mi><mfrac><mrow><mi>q</mi></mrow><mrow><mrow data-group="‖">'),
        ("KL( p ‖ q )", '<mi>p</mi><mo stretchy="false" largeop="false">‖</mo>'),
        ("Δ_{(b+1),j}", "<msub><mi"),
        ("Σ a / Σ b", '<mo stretchy="false" largeop="false">/</mo>'),
        ("mean_S Δᵢ", "<msub><mtext>mean</mtext><mrow><mi>S</mi></mrow></msub>"),
    ],
)
def test_equations_become_mathml(text, expected):
    from docsite.maths import mathml

    assert expected in mathml(text)


def test_every_equation_of_a_method_is_found_and_well_formed():
    from xml.etree import ElementTree

    from docsite.maths import equations, is_maths

    found = 0
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        for block in re.findall(r"(?:^    .+\n)+", page.read_text("utf-8"), re.M):
            lines = block.split("\n")
            assert is_maths(lines) != ("fedflat run" in block), block
            if is_maths(lines):
                assert ElementTree.fromstring(equations(lines)).tag == "dl"
                found += 1
    assert found > 50


@pytest.mark.parametrize("block", ["fedflat flatness runs/a", "round 3: ‖Δᵢ‖ = 0.4261 is large", 'x = {"ε": 1}'])
def test_commands_and_outputs_stay_text(block):
    from docsite.maths import is_maths

    assert not is_maths([f"    {block}"])


def test_the_link_check_finds_what_is_missing_and_what_comes_from_elsewhere(tmp_path):
    from docsite.links import faults

    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><a href="b.html#there">b</a><a href="#top">top</a>', "utf-8")
    (tmp_path / "b.html").write_text(
        '<p id="there"></p><a href="c.html">c</a><a href="a.html#no">a</a><a href="https://x.org">x</a>'
        '<script src="https://cdn.example/x.js"></script>',
        "utf-8",
    )
    assert faults(tmp_path) == [
        "b.html: loads https://cdn.example/x.js",
        "b.html: a.html#no has no such anchor",
        "b.html: c.html does not exist",
    ]


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    import nbformat
    from docsite.notebooks import page

    cell = nbformat.v4.new_code_cell("1 + 1")
    cell.outputs = [
        nbformat.v4.new_output("execute_result", data={"text/plain": "2"}),
        nbformat.v4.new_output("display_data", data={"image/png": "aGk="}),
        nbformat.v4.new_output("stream", name="stderr", text="a bar"),
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title"), cell])
    text = page(book, tmp_path / "title")
    assert text.startswith("# Title\n\n```python\n1 + 1\n```\n\n```text\n2\n```")
    assert "(title/cell-1-1.png)" in text and "a bar" not in text
    assert (tmp_path / "title" / "cell-1-1.png").read_bytes() == b"hi"


@pytest.mark.parametrize("file", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_are_yaml(file):
    yaml = pytest.importorskip("yaml")
    assert json.dumps(yaml.safe_load(file.read_text("utf-8")), default=str)


def test_the_tests_run_on_every_python_that_the_package_claims():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    claimed = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == claimed
    assert project["requires-python"] == f">={claimed[0]}"
    systems = [c for c in project["classifiers"] if c.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"] and jobs["tests"]["runs-on"] == "ubuntu-latest"


def test_workflows_call_what_is_there():
    """Targets of make and commands of fedflat that a workflow names exist."""
    targets = set(re.findall(r"^([\w.]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)) | {".venv/.ready"}
    from fedflat.cli import app

    commands = {each.name or each.callback.__name__ for each in app.registered_commands}
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text("utf-8")
        for words in re.findall(r"run: make (.*)", text):
            assert set(words.split()) <= targets, words
        called = set(re.findall(r"(?:run: |&& )fedflat (\w+)", text))
        assert called and called <= commands, called - commands
