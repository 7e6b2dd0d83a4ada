"""Classes of a notebook or script are kept with the run as code, so that others can open it."""

import json
import os
import subprocess
import sys

import pytest

import forking
from fedflat import trusted
from fedflat.errors import RecipeError, RunError
from fedflat.runs import own_classes
from fedflat.runs.loading import load_run
from fedflat.runs.own_classes import CodeError, own_code

CELLS = [
    "import torch, fedflat\nfrom dataclasses import dataclass\nfrom torch import nn, relu\nfrom fedflat import Part",
    "WIDTH, x = 6, torch.randn(3)  # forward has an x of its own",
    "def squash(h):\n    return relu(h) * SCALE",
    "SCALE = 0.5",
    "class Base(nn.Module):\n    pass",
    NET := """
class Net(Base):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.body, self.head = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(squash(self.body(x.flatten(1))))
""",
    """
@dataclass(frozen=True)
class Pull(Part):
    rate: float = 0.1

    def plan(self, rule, sent, memory):
        return rule.with_pull(-self.rate * sent["weights"], decay=self.rate)
""",
    "federation = fedflat.federate('digits', clients=4, alpha=0.5, limit=200)",
    "result = fedflat.train(federation, Net(), Pull(0.2), rounds=2, engine='inline', out='run')",
    "print(fedflat.Result.load('run').accuracy == result.accuracy)",
    NET.replace("return", "# only a comment is new\n        return"),
    "fedflat.train(federation, Net(), Pull(0.2), rounds=3, engine='inline', out='run', resume=True)",
]
NOTEBOOK = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    shell.run_cell(cell, store_history=True).raise_error()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("IPython")
    folder = tmp_path_factory.mktemp("notebook")
    command = [sys.executable, "-c", NOTEBOOK]
    done = subprocess.run(command, cwd=folder, input=json.dumps(CELLS), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "True" in done.stdout, done.stdout + done.stderr
    return folder / "run"


def test_everybody_can_open_the_run_once_they_trust_its_code(run, monkeypatch):
    monkeypatch.setattr(trusted, "_packages", set())
    with pytest.raises(
        RecipeError, match=r"own_\w+:Pull': is code from outside of fedflat; if you trust it add --trust"
    ):
        load_run(run)
    monkeypatch.setattr(trusted, "_anything", True)
    problem = load_run(run)
    assert problem.network.size == 64 * 6 + 6 + 6 * 10 + 10
    assert repr(problem.method) == "Method(Pull(rate=0.2))"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3  # it went on


def test_the_code_of_the_network_stands_without_fedflat(run):
    (code,) = (path for path in run.glob("own_*.py") if "class Net" in path.read_text())
    assert "fedflat" not in code.read_text() and "WIDTH = 6" in code.read_text() and "x = " not in code.read_text()
    assert forking.fedflat("export", str(run), "--trust", "--no-onnx", "-o", str(run / "card")).returncode == 0
    card = (run / "card" / "README.md").read_text("utf-8")
    piece = card.split("```python\n")[1].split("```")[0]
    done = forking.without_fedflat(f"{piece}\nprint(tuple(logits.shape))", run / "card")
    assert done.stdout.strip() == "(4, 10)", done.stderr


def test_code_that_was_changed_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(trusted, "_anything", True)
    for path in run.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for path in tmp_path.glob("own_*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
        path.write_text(path.read_text() + "print('mine')\n")
    with pytest.raises(RunError, match="has been changed since the run; its digest differs"):
        load_run(tmp_path)


def test_the_code_is_the_same_in_every_process(tmp_path, monkeypatch):
    """Processes differ in their seed of hashes, and so in the order of sets."""
    script = tmp_path / "script.py"
    names = [f"VALUE_{number}" for number in range(20)]
    script.write_text(
        "from fedflat.runs.own_classes import own_code\n"
        + "".join(f"{name} = {number}\n" for number, name in enumerate(names))
        + f"def total():\n    return {' + '.join(names)}\n"
        + "print(own_code({'total'}).name)\n"
    )
    seed = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, script], env=seed, capture_output=True, text=True).stdout
    run_as_main(script, script.read_text(), monkeypatch)
    here = own_code({"total"}).name
    assert here == there.strip() and here.startswith("own_")


def run_as_main(file, text, monkeypatch):
    """Run a script in this process as if it had been started."""
    module = type(sys)("__main__")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, own_classes.MAIN, module)
    exec(compile(text, str(file), "exec"), vars(module))


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ("x = object()\ndef Net():\n    return x", "it uses x, a object that only this script or notebook has"),
        ("def Net():\n    return 1\nNet.__module__ = 'x'", "Net, a function"),
        ("exec('def Net(): pass')", "the source of Net is not known"),
        (
            "def wrap(f):\n    return f\n@wrap\ndef Net():\n    pass\ndel wrap",
            r"its code alone: cannot be imported .NameError",
        ),
        ("def wrap(f):\n    return f\ndef Net():\n    pass", ""),
    ],
)
def test_what_cannot_be_kept_is_said(space, sentence, monkeypatch, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(space)
    run_as_main(file, space, monkeypatch)
    if sentence:
        with pytest.raises(CodeError, match=sentence):
            own_code({"Net"})
    else:
        assert "wrap" not in own_code({"Net"}).text
