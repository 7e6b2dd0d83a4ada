"""A file from anybody: what it names is not imported, and not called, unless the user says so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import fedflat
import forking
from fedflat import Part, trust, trusted
from fedflat.cli import app
from fedflat.errors import RecipeError
from fedflat.methods import parse
from fedflat.recipe import load
from fedflat.runs import execute, load_run
from fedflat.runs.build import prepare
from fedflat.runs.verify import verify
from fedflat.trusted import named_class, trust_anything

TINY = ["model.hidden=[8]", "split.clients=4", "server.cohort=2", "server.rounds=2", "local.steps=1", "engine=inline",
        "checkpoint.every=1"]  # fmt: skip
EVIL = """
from pathlib import Path
Path("fuse").touch()

from torch import nn
from fedflat import Part

class Net(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        return super().forward(x.flatten(1))

class Mine(Part):
    pass
"""


@pytest.fixture(autouse=True)
def nobody_trusted(tmp_path, monkeypatch):
    """A user who trusts nobody yet, in a folder with somebody else's code."""
    monkeypatch.setattr(trusted, "_packages", set())
    monkeypatch.setattr(trusted, "_anything", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    yield
    sys.modules.pop("evil", None)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A finished run, of which the attacks are copies."""
    problem = prepare(load(None, TINY))
    folder = tmp_path_factory.mktemp("honest") / "run"
    execute(problem, folder)
    return folder


@pytest.fixture(params=["model", "method"])
def hostile(request, honest, tmp_path):
    """A run from somebody else, whose recipe names code."""
    folder = shutil.copytree(honest, tmp_path / "theirs")
    recipe = folder / "recipe.toml"
    text = recipe.read_text()
    if request.param == "model":
        text = (
            text.replace('name = "mlp"', 'name = "evil:Net"').replace("hidden = [8]\n", "").replace("bias = true\n", "")
        )
    else:
        text = text.replace('method = "fedavg"', 'method = "evil:Mine"')
    recipe.write_text(text)
    (tmp_path / "sweep.toml").write_text('preset = "none"\n' + text + "\n[grid]\nseed = [0]\n")
    return folder


def fedflat_command(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, str(done.exception or "") + done.output


READERS = [["resume"], ["flatness"], ["landscape"], ["duality"], ["export", "--no-onnx"], ["personalize"],
           ["report", "--measure"]]  # fmt: skip


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_no_command_imports_what_somebody_elses_run_names(command, hostile, tmp_path):
    code, said = fedflat_command(*command, hostile)
    assert code and 'is code from outside of fedflat; if you trust it add --trust, or list "evil"' in said
    assert not (tmp_path / "fuse").exists() and "evil" not in sys.modules


RECIPES = [["run"], ["recipe"], ["flower", "init", "app", "--recipe"]]


@pytest.mark.parametrize("command", RECIPES, ids=lambda command: command[0])
def test_nor_what_a_recipe_names(command, hostile, tmp_path):
    code, said = fedflat_command(*command, hostile / "recipe.toml")
    if "evil:Net" in (hostile / "recipe.toml").read_text() and command[0] != "run":
        assert code == 0  # who only prints a recipe builds no model
    else:
        assert code and "add --trust" in said
    assert not (tmp_path / "fuse").exists() and "evil" not in sys.modules


def test_nor_what_a_sweep_names(hostile, tmp_path):
    done = forking.fedflat("sweep", "sweep.toml")
    assert done.returncode and "add --trust" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "fuse").exists()


def test_nor_what_a_recorded_trajectory_names(tmp_path):
    recorded = Path(__file__).parent / "trajectories" / "man-fedavg.npz"
    with np.load(recorded) as file:
        arrays = dict(file)
    recipe = json.loads(str(arrays["recipe"])) | {"method": "evil:Mine", "options": {}}
    np.savez(tmp_path / "theirs.npz", **{**arrays, "recipe": json.dumps(recipe)})
    code, _ = fedflat_command("verify", "theirs.npz")
    assert code == 1 and "evil" not in sys.modules and not (tmp_path / "fuse").exists()
    with pytest.raises(RecipeError, match="add --trust"):
        verify(tmp_path / "theirs.npz")


@pytest.mark.parametrize("arguments", [["report"], ["watch", "--once"], ["watch", "--json"]], ids=" ".join)
def test_a_run_from_somebody_else_opens_for_reading(arguments, hostile, tmp_path):
    code, said = fedflat_command(*arguments, hostile)
    assert code == 0, said
    assert not (tmp_path / "fuse").exists() and "evil" not in sys.modules


def test_with_trust_the_same_commands_work(hostile, tmp_path):
    shutil.rmtree(hostile / "checkpoints")
    for name in ("metrics.jsonl", "summary.json", "model.safetensors"):
        (hostile / name).unlink()
    code, said = fedflat_command("resume", hostile, "--trust")
    assert code == 0 and (tmp_path / "fuse").exists(), said
    code, said = fedflat_command("flatness", hostile, "--trust", "--samples", 50, "--json")
    assert code == 0, said


def test_files_in_the_current_directory_do_not_stand_in_for_libraries(honest, tmp_path):
    for shadow in ("scipy", "json", "safetensors"):
        (tmp_path / f"{shadow}.py").write_text(f'open("fuse-{shadow}", "w")')
    command = (
        "from fedflat.cli import main; main()"  # as the installed command: it has no current directory in its path
    )
    for call in (["-P", "-c", command, "flatness"], ["-P", "-m", "fedflat.cli", "flatness"]):
        done = subprocess.run(
            [sys.executable, *call, honest, "--samples", "50", "--json"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert not [*tmp_path.glob("fuse*")]


def configured(text):
    path = trusted.config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_users_configuration_lists_packages_that_are_installed_and_not_files_that_lie_about(tmp_path, monkeypatch):
    configured('trust = ["evil"]')
    assert trusted.config_file() == tmp_path / "config/fedflat/config.toml"
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    with pytest.raises(RecipeError, match="evil cannot be imported"):
        named_class("evil:Net", nn.Module, "model.name")
    monkeypatch.syspath_prepend(tmp_path)
    assert issubclass(named_class("evil:Net", nn.Module, "model.name"), nn.Linear)
    assert parse("evil:Mine").parts


@pytest.mark.parametrize("text", ['trust = "evil"', "trust = [1]", "trsut = []", "trust = [", "a=" + "[" * 5000])
def test_a_mistake_in_the_configuration_is_named(text):
    configured(text)
    with pytest.raises(RecipeError, match=r"config\.toml: "):
        named_class("evil:Net", nn.Module, "model.name")


def test_in_python_the_users_own_objects_need_no_permission_and_names_need_it(digits, tmp_path, monkeypatch):
    class Net(nn.Linear):
        def __init__(self):
            super().__init__(64, 10)

        def forward(self, x):
            return super().forward(x.flatten(1))

    class Mine(Part):
        pass

    assert fedflat.train(digits, Net(), Mine(), rounds=1, steps=1, engine="inline").history
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"fedflat\.trust\(\"evil\"\)"):
        fedflat.train(digits, "evil:Net", rounds=1, steps=1, engine="inline")
    trust("evil")
    assert fedflat.train(digits, "evil:Net", "evil:Mine", rounds=1, steps=1, engine="inline").history


@pytest.mark.parametrize(
    "path",
    ["os:system", "subprocess:Popen", "builtins:eval", "builtins:dict", "torch:load", "evil:nothing", "evil:Path"],
)
def test_even_where_everything_is_trusted_only_classes_of_the_right_kind_are_called(path, monkeypatch, tmp_path):
    trust_anything()
    monkeypatch.syspath_prepend(tmp_path)
    for kind, field in ((nn.Module, "model.name"), (Part, "method")):
        why = "evil has no nothing" if path == "evil:nothing" else f"is not a class that inherits from {kind.__name__}"
        with pytest.raises(RecipeError, match=f"{field} = '{path}': {why}"):
            named_class(path, kind, field)
    with pytest.raises(RecipeError, match="inherits from Part"):
        named_class("evil:Net", Part, "method")
    with pytest.raises(RecipeError, match="inherits from Module"):
        named_class("evil:Mine", nn.Module, "model.name")


@pytest.mark.parametrize(
    "path", ["", ":", "os:", ":system", "os", "../evil:Net", "os.:x", "os:a.b", "os:system\n", "o s:x"]
)
def test_what_is_no_path_is_named(path):
    trust_anything()
    with pytest.raises(RecipeError, match=r"is not a path of the form package\.module:Class"):
        named_class(path, nn.Module, "model.name")


def test_the_command_line_itself_is_not_started_by_a_name():
    with pytest.raises(RecipeError, match="add --trust"):
        named_class("fedflat.cli.__main__:Net", nn.Module, "model.name")


def test_a_sweep_cannot_give_itself_trust(tmp_path):
    (tmp_path / "sweep.toml").write_text("after = [\"flatness '--tru'st\"]\n[grid]\nseed = [0]\n")
    code, said = fedflat_command("sweep", "sweep.toml", "--dry")
    assert code and "a file cannot say --trust" in said


def test_a_module_that_ends_the_process_is_named(tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    trust("leaves")
    with pytest.raises(RecipeError, match=r"leaves cannot be imported \(SystemExit: 0\)"):
        parse("leaves:Mine")


def test_an_own_run_opens_in_python_once_its_package_is_trusted(hostile, tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"theirs: (model\.name|method) = 'evil:"):
        load_run(hostile)
    assert not (tmp_path / "fuse").exists()
