"""The command line as a newcomer meets it: a version, short answers, hints, narrow and plain terminals."""

import gzip
import json
import os
import shlex
import subprocess
import sys

import pytest

import fedflat as package
from fedflat.cli.app import encode_anything
from fedflat.recipe import PRESETS, load

QUICK = ["--set", "server.rounds=2", "data.limit=200", "model.hidden=[4]", "engine=inline"]


@pytest.fixture
def fedflat(called_in, tmp_path):
    return called_in(tmp_path)


def test_the_version_is_that_of_the_package(fedflat):
    assert fedflat("--version") == (0, f"fedflat {package.__version__}\n", "")


def test_python_m_fedflat_is_the_command_and_an_ascii_terminal_gets_an_answer(tmp_path):
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    command = [sys.executable, "-m", "fedflat", "methods", "fedsmoo"]
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "radius rho of the perturbation; a number >= 0" in done.stdout


def test_what_ascii_lacks_is_spelled():
    encode_anything()
    assert "λ₁ ± ε… ‖w̄‖²".encode("ascii", "fedflat.plain") == b"lambda1 +/- eps... ||w||2"


def test_a_shell_can_complete_commands_and_names(fedflat, monkeypatch):
    monkeypatch.setenv("_FEDFLAT_COMPLETE", "complete_bash")
    for words, expected in {
        "fedflat swe": "sweep",
        "fedflat run s": "smoo\nsol",
        "fedflat sweep man-r": "man-rounds",
    }.items():
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert fedflat()[1].strip() == expected


def test_without_a_command_the_help_is_printed_and_nothing_else(fedflat):
    assert fedflat() == (2, fedflat("--help")[1], "")


def test_the_help_of_a_command_says_what_its_arguments_are(fedflat):
    for command, says in {
        "run": "recipe file (TOML) or preset",
        "resume": "run directory that",
        "plot": "run directories, or directories that contain several",
    }.items():
        code, printed, _ = fedflat(command, "--help")
        assert code == 0 and says in " ".join(printed.split())


def test_verbose_prints_every_setting(fedflat):
    code, printed, _ = fedflat("run", "--verbose", *QUICK)
    assert code == 0
    assert "clip_mode = " in printed and 'method = "fedavg"' in printed


@pytest.mark.parametrize("width", [30, 60, 80])
def test_no_number_is_cut_in_a_narrow_terminal(called_in, tmp_path, width):
    code, printed, complaint = called_in(tmp_path, width)("run", "--method", "feddyn + man(0.15)", *QUICK)
    assert code == 0, complaint
    assert "…" not in printed
    summary = json.loads((tmp_path / "runs/0001/summary.json").read_text())
    for name in ("last", "best", "mean_of_last_10"):
        assert f"{summary[f'accuracy_{name}']:.4f}" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["run", "--set", "lr=0.1"], 2, "lr: there is no such field; did you mean local.lr or server.lr?"),
        (["run", "--set", "local.alpha=0.1"], 2, "local.alpha: there is no such field; did you mean split.alpha?"),
        (["run", "--set", "local.lr=1e400"], 2, "local.lr = inf: must be a finite number"),
        (["run", "--set", "admission.max_norm=nan"], 2, "admission.max_norm = nan: is not a number"),
        (["run", "grid.toml"], 2, "grid.toml: is a sweep file (it has a [grid]); train it with `fedflat sweep grid"),
        (["sweep", "bare.toml"], 2, "or train this recipe by `fedflat run`"),
        (["sweep", "sol"], 2, "sol: is a preset, not a sweep; train it with `fedflat run sol`"),
        (["report", "run", "-o", "r.pdf"], 2, "-o r.pdf: a report is an HTML page"),
        (["run", "--set", "model=nets:Nett", "--trust"], 2, "model.name = 'nets:Nett': nets has no Nett; did you"),
        (["run", "--set", "model=nets:Net", "--trust"], 3, "model: it cannot process inputs of shape (4, 1, 8, 8)"),
        (["rnu"], 2, "fedflat: No such command 'rnu'; did you mean run?\n"),
        (["flower", "key"], 2, "fedflat: No such command 'key'; did you mean keys?\n"),
        (["data", "zzz"], 2, "fedflat: No such command 'zzz'; known: get, list, show\n"),
        (["flower", "init", "bare.toml"], 6, "bare.toml: is a file; choose another directory"),
        (["tune", "--space", "local.lr=0.1,fast", "--trials", "2"], 2, "local.lr = 'fast': input should be"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_by_what_would_do(fedflat, tmp_path, arguments, code, sentence):
    (tmp_path / "grid.toml").write_text("[grid]\nseed = [0]\n")
    (tmp_path / "bare.toml").write_text("seed = 0\n")
    (tmp_path / "nets.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Linear(3, 3))\n"
    )
    found, printed, complaint = fedflat(*arguments)
    assert (found, printed) == (code, "")
    assert sentence in complaint and len(complaint.splitlines()) == 1
    assert not (tmp_path / "r.pdf").exists()


def test_a_byte_order_mark_does_not_make_a_recipe_invalid(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 7\n")
    assert load(path).seed == 7


@pytest.mark.parametrize("preset", PRESETS)
def test_the_method_of_a_preset_has_the_same_options_when_it_is_named_again(preset):
    from fedflat.methods.parser import spell
    from fedflat.runs.result import bare_method

    method = load(preset).method
    assert spell(bare_method(method)) == spell(method)


def test_an_archive_that_is_cut_short_is_not_in_place(fedflat, tmp_path):
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    whole = gzip.compress(bytes(range(256)) * 100)
    archive = folder / "train-images-idx3-ubyte.gz"
    archive.write_bytes(whole)
    assert json.loads(fedflat("data", "list", "--dir", "data", "--json")[1])["mnist"] == "data/mnist"
    archive.write_bytes(whole[:-9])
    assert json.loads(fedflat("data", "list", "--dir", "data", "--json")[1])["mnist"] is None
    told = "data/mnist/train-images-idx3-ubyte.gz is incomplete; delete it, then run `fedflat data get mnist`"
    assert told in fedflat("data", "list", "--dir", "data")[1]


@pytest.mark.parametrize("command", """
    table file.txt | table empty | table nowhere | table nowhere/there | table fedsol-tabel1
    table fedsol-table1 nowhere | table fedsol-table1 file.txt | table fedsol-table1 --rows method
    table --rows method | table empty --format pdf | table empty --digits -1 | table empty --best most | plot
    plot nowhere | plot empty | plot file.txt | plot empty -o x.doc | plot empty --kind pie
    plot empty --width wide | plot empty --target x | plot empty --kind target --target nan | run binary.toml
    run empty | run file.txt | run --method '' | run --seeds 0 | run --set | run --set = | run --set a=b=c
    run --set local=3 | run --set local.lr | run --set local.lr= | run --set task=classification(
    run --set data=os:system | run --set task=classification(loss=os:system) | run --set split.alpha=-inf
    run --resume | run sol man | resume nowhere | resume empty | sweep nowhere.toml | sweep binary.toml
    sweep empty | sweep file.txt | report nowhere | report empty | report empty -o x.pdf | recipe nothing
    recipe sol --set x | data get nothing | data show nothing | data show arrays | flower init | methods nothing
    verify file.txt | verify empty | export nowhere | flatness nowhere | flatness nowhere --k 0
    landscape nowhere --span -1 | path nowhere nowhere | trajectory nowhere | animate nowhere -o x.pdf
    rescale nowhere | duality nowhere | personalize nowhere | watch nowhere --once | watch file.txt --once
    watch empty --json | --verson | nothing
""".strip().replace("\n    ", " | ").split(" | "))  # fmt: skip
def test_bad_input_is_one_sentence_and_an_exit_code_whatever_the_command(fedflat, tmp_path, command):
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").mkdir()
    code, _, complaint = fedflat(*shlex.split(command))
    assert code in (1, 2, 3, 6)
    assert complaint.startswith("fedflat: ") and len(complaint.splitlines()) == 1
