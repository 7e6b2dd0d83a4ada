"""A run directory that somebody else prepared: links, pipes and devices where files are expected."""

import json
import os
import shutil
import signal
import sys

import pytest
from typer.testing import CliRunner

from fedflat.cli.app import app
from fedflat.errors import FedflatError, RunError
from fedflat.files import changeable, opened, read_bytes, write_whole
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pipes and links")
TINY = ["method=scaffold", "model.hidden=[4]", "split.clients=2", "server.cohort=2", "server.rounds=2", "local.steps=1",
        "engine.name=inline", "engine.group=1", "checkpoint.every=1"]  # fmt: skip
FILES = ("metrics.jsonl", "summary.json", "model.safetensors", "recipe.toml", "checkpoints/00000002.json",
         "checkpoints/00000002.server.safetensors", ".lock")  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted") / "sound"
    execute(prepare(load(None, TINY)), folder)
    return folder


@pytest.fixture
def run(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path):
    """A file of the user's that no run has anything to do with."""
    path = tmp_path / "victim"
    path.write_text("precious\n")
    return path


@pytest.fixture(autouse=True)
def soon():
    """What waits at a pipe fails instead of hanging."""

    def late(*_):
        raise TimeoutError("it waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def command(*words):
    """The exit code and the text of a command, which may fail by a sentence but not by a traceback."""
    found = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(found.exception, FedflatError):
        return found.exception.exit_code, str(found.exception)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "words", [("resume",), ("report", "--out", "page.html"), ("watch", "--once")], ids=lambda w: w[0]
)
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(name, words, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (run / name).unlink()
    os.mkfifo(run / name)
    command(words[0], run, *words[1:])


def test_nor_does_one_in_a_sweep_or_among_ones_data(tmp_path):
    from fedflat import federate
    from fedflat.errors import DataError
    from fedflat.runs.sweep import load_sweep
    from fedflat.runs.sweep.results import refuse_other_settings

    (tmp_path / "sweep.toml").write_text('[grid]\n"local.lr" = [0.1]\n')
    sweep = load_sweep(tmp_path / "sweep.toml")
    for name in (f"{sweep.points[0].slug}/result.json", "table.csv", "images/a/1.png", "images/b/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        os.mkfifo(tmp_path / name)
    refuse_other_settings(tmp_path, sweep)
    for data, label in (("table.csv", {"label": "y"}), ("images", {})):
        with pytest.raises(DataError, match="is not a regular file"):
            federate(str(tmp_path / data), clients=2, **label)


def test_nor_does_one_among_the_files_of_a_tracker(tmp_path):
    pytest.importorskip("tensorboard")
    from fedflat.runs.trackers import _last_step

    os.mkfifo(tmp_path / "events.out.tfevents.1")
    assert _last_step(tmp_path) == 0


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_link_in_place_of_the_metrics_does_not_cut_the_file_behind_it(kind, run, victim):
    """Without checkpoints a run begins at round 0, with the metrics cut to nothing."""
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(victim) if kind == "symbolic" else (run / "metrics.jsonl").hardlink_to(victim)
    code, said = command("resume", run)
    assert victim.read_text() == "precious\n"
    if kind == "symbolic":
        assert code == RunError.exit_code and "metrics.jsonl is a symbolic link" in said
    else:
        assert code == 0 and len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_links_under_the_names_of_files_that_are_written_are_not_followed(run, victim):
    """Also under those of the files aside, which have the number of the process in their names."""
    names = ["recipe.toml", "model.safetensors", "summary.json"]
    for name in [*names, *(f".{name}.{os.getpid()}" for name in names), "flatness.json"]:
        keep = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        if keep is not None and not name.startswith("."):
            (run / name).write_bytes(keep)
        else:
            (run / name).symlink_to(victim)
    assert command("resume", run, "--set", "server.rounds=3")[0] == 0
    assert command("flatness", run, "--samples", "20", "--k", "1")[0] == 0
    assert victim.read_text() == "precious\n"
    assert json.loads((run / "flatness.json").read_text())


def test_checkpoints_that_are_a_link_cost_nobody_theirs(run, tmp_path):
    """A run keeps the last two of its checkpoints and removes the others: these are somebody else's."""
    precious = tmp_path / "precious"
    shutil.move(run / "checkpoints", precious)
    (run / "checkpoints").symlink_to(precious, target_is_directory=True)
    before = {path.name: path.read_bytes() for path in precious.iterdir()}
    code, said = command("resume", run, "--set", "server.rounds=5")
    assert code == RunError.exit_code and "checkpoints: is a symbolic link" in said
    assert {path.name: path.read_bytes() for path in precious.iterdir()} == before


@pytest.mark.parametrize(
    ("tracker", "folder"), [("tensorboard", "tensorboard"), ("mlflow", "mlruns"), ("wandb", "wandb")]
)
def test_a_tracker_does_not_write_through_a_link(tracker, folder, tmp_path):
    from fedflat.recipe import load
    from fedflat.runs.trackers import Trackers

    elsewhere, run, said = tmp_path / "elsewhere", tmp_path / "run", []
    elsewhere.mkdir(), run.mkdir()
    (run / folder).symlink_to(elsewhere, target_is_directory=True)
    with Trackers(load(None, [f'trackers=["{tracker}"]']), run, said.append) as trackers:
        trackers({"round": 1, "loss": 0.5})
    assert not [*elsewhere.iterdir()]
    assert len(said) == 1 and f"{folder} is a symbolic link" in said[0]


def test_a_landscape_is_not_written_through_a_link(tmp_path, victim):
    from fedflat.federation import save_npz

    (tmp_path / "landscape.npz").symlink_to(victim)
    save_npz(tmp_path / "landscape.npz", axes=[1.0])
    assert victim.read_text() == "precious\n" and not (tmp_path / "landscape.npz").is_symlink()


def test_a_file_that_declares_more_than_there_is_memory_is_a_sentence(tmp_path):
    with (tmp_path / "summary.json").open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(OSError, match="more than there is memory"):
        read_bytes(tmp_path / "summary.json")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_devices_are_neither_read_nor_written(path):
    for how in (opened, read_bytes, changeable):
        with pytest.raises(OSError, match="is not a regular file"):
            how(path)


def test_a_written_file_is_for_its_owner_unless_it_is_public(tmp_path):
    write_whole(tmp_path / "a", b"x")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_the_records_of_a_run_say_cannot_steer_the_terminal(run, capsysbinary):
    from fedflat.cli.app import out

    lines = (run / "metrics.jsonl").read_text().splitlines()
    odd = "\x1b]0;owned\x07\x1b[2J\x9b31m"
    last = {**json.loads(lines[-1]), "skipped": odd, "refused": [{"client": 1, "reason": odd, "detail": odd}]}
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    code, said = command("watch", run, "--once")
    assert code == 0 and "owned" in said and not {"\x1b", "\x07", "\x9b"} & {*said}
    out.print(odd, markup=False)
    assert b"\x1b" not in capsysbinary.readouterr().out
