"""Following a run from outside: real runs, real files, real processes."""

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat import train
from fedflat.cli.watch import Followed
from fedflat.errors import RunError
from fedflat.recipe import Recipe

PATIENCE = 60  # seconds, against hanging only
TINY = dict(rounds=6, model_hidden=[8], cohort=3, engine="inline")


def fedflat(*arguments, cwd, **streams):
    command = [sys.executable, "-m", "fedflat.cli", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "100"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, preexec_fn=_heeds_ctrl_c, **pipes)


def _heeds_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, such as these tests, ignore it


def ended(process):
    said, complaint = process.communicate(timeout=PATIENCE)
    return process.returncode, said, complaint


def lines(count, first=1, **values):
    return [json.dumps({"round": number, **values}).encode() + b"\n" for number in range(first, first + count)]


@pytest.fixture
def folder(tmp_path):
    """A run of 30 rounds that has just begun."""
    (tmp_path / "recipe.toml").write_text(Recipe().to_toml())
    (tmp_path / "metrics.jsonl").touch()
    return tmp_path


def append(folder, *some):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(some))


def test_a_watcher_waits_for_a_run_follows_it_and_ends_with_it(tmp_path):
    watcher = fedflat("watch", "mine", "--every", "0.05", cwd=tmp_path)
    assert watcher.stdout.readline() == "waiting for a run in mine\n"
    small = ("server.rounds=6", "model.hidden=[8]", "evaluation.sharpness=3", "engine=inline")
    run = fedflat("run", "--out", "mine", "--set", *small, cwd=tmp_path)
    code, said, complaint = ended(watcher)
    assert (code, complaint) == (0, "")
    assert ended(run)[0] == 0
    *_, last = said.splitlines()
    assert last.startswith("mine: round 6/6  accuracy 0.")
    assert last.endswith("finished")
    records = [json.loads(text) for text in (tmp_path / "mine/metrics.jsonl").read_text().splitlines()]
    assert f"λ₁ {records[-1]['lambda1']:.4g}" in last
    assert "\x1b" not in said


def test_in_a_terminal_it_leaves_the_last_screen_and_the_cursor(digits, tmp_path):
    train(digits, out=tmp_path / "mine", **TINY)
    ours, theirs = pty.openpty()
    watcher = fedflat("watch", "mine", cwd=tmp_path, stdout=theirs, stderr=theirs)
    assert watcher.wait(PATIENCE) == 0
    os.close(theirs)
    said = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "6/6" in said and "finished" in said
    assert "\x1b[?25h" in said  # the cursor is shown again


def test_elsewhere_it_prints_who_was_refused_since_it_looks_on_and_a_line_for_what_is_new(folder):
    refused = [{"client": 5, "reason": "raised", "detail": "ValueError"}]
    append(folder, *lines(2, refused=refused, seconds=1.0))
    watcher = fedflat("watch", ".", "--every", "0.05", cwd=folder)
    assert watcher.stdout.readline() == ".: round 2/30  2 refused  1 s a round, 0:28 left\n"
    append(folder, *lines(1, 3, refused=refused, seconds=1.0))
    assert watcher.stdout.readline() == "round 3: client 5 refused: raised: ValueError\n"
    assert watcher.stdout.readline() == ".: round 3/30  3 refused  1 s a round, 0:27 left\n"
    append(folder, *lines(27, 4, seconds=1.0))
    assert ended(watcher) == (0, ".: round 30/30  3 refused  finished\n", "")


def test_ctrl_c_ends_it_without_a_word(folder):
    watcher = fedflat("watch", ".", "--every", "0.05", cwd=folder)
    assert "no round yet" in watcher.stdout.readline()
    watcher.send_signal(signal.SIGINT)
    assert ended(watcher) == (0, "", "")


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_a_single_look_where_no_run_is_is_a_sentence_and_exit_code_6(tmp_path, option):
    code, said, complaint = ended(fedflat("watch", "nothing", option, cwd=tmp_path))
    assert (code, said) == (6, "")
    assert complaint == "fedflat: nothing: no run is here yet; begin one, or let `fedflat watch nothing` wait for it\n"


def test_a_single_look_shows_what_there_is(folder):
    refused = [{"client": 5, "reason": "raised", "detail": "ValueError"}]
    append(folder, *lines(3, accuracy=0.75, seconds=2.0), *lines(1, 4, refused=refused, seconds=2.0))
    code, said, _ = ended(fedflat("watch", ".", "--once", cwd=folder))
    assert code == 0
    assert "round 4, client 5: raised: ValueError" in said
    found = json.loads(ended(fedflat("watch", ".", "--json", cwd=folder))[1])
    assert (found["round"], found["rounds"], found["seconds_left"]) == (4, 30, 52.0)
    assert (found["accuracy"], found["refused"]) == (0.75, {"raised": 1})


def test_every_round_of_a_run_is_told_as_soon_as_it_is_done(digits, tmp_path):
    run, told = Followed(tmp_path / "mine"), []
    assert (run.look(), run.story) == ([], None)
    result = train(digits, out=tmp_path / "mine", callbacks=[lambda record: told.append(run.look())], **TINY)
    assert [*map(len, told)] == [1] * 6
    assert [record for some in told for record in some] == result.history
    assert run.story.complete


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=8))
def test_wherever_a_line_is_cut_while_it_is_written_the_records_are_the_same(cuts):
    content = b"".join(lines(12, accuracy=0.5, cohort=[1, 2, 3]))
    with tempfile.TemporaryDirectory() as name:
        folder, told = Path(name), []
        (folder / "recipe.toml").write_text(Recipe().to_toml())
        run = Followed(folder)
        for end in [*sorted(cuts), len(content)]:
            (folder / "metrics.jsonl").write_bytes(content[:end])
            told += run.look()
    assert [record["round"] for record in told] == [*range(1, 13)]


def test_a_look_does_not_read_again_what_it_has_read(folder):
    run, before = Followed(folder), lines(9)
    append(folder, *before)
    run.look()
    unread = b"".join(b"\0" * len(text) for text in before[:-1])
    (folder / "metrics.jsonl").write_bytes(unread + before[-1])
    append(folder, *lines(1, 10))
    assert [record["round"] for record in run.look()] == [10]
    assert run.story.round == 10


@pytest.mark.parametrize("regrown", [2, 20])
def test_a_run_that_was_resumed_from_before_is_told_anew(folder, regrown):
    run, kept = Followed(folder), lines(3, accuracy=0.25)
    append(folder, *kept, *lines(6, 4, accuracy=0.75))
    run.look()
    (folder / "metrics.jsonl").write_bytes(b"".join([*kept, *lines(regrown, 4, accuracy=0.5)]))
    assert len(run.look()) == 3 + regrown
    assert (run.story.round, run.story.best) == (3 + regrown, (4, 0.5))


def test_a_summary_ends_a_run_but_not_one_that_is_being_made_longer(folder):
    append(folder, *lines(5))
    run, summary, metrics = Followed(folder), folder / "summary.json", folder / "metrics.jsonl"
    run.look()
    assert not run.story.complete
    summary.write_text("{}")
    os.utime(metrics, ns=(0, 1_000))
    os.utime(summary, ns=(0, 2_000))
    run.look()
    assert run.story.complete
    os.utime(metrics, ns=(0, 3_000))
    run.look()
    assert not run.story.complete


def test_more_rounds_in_the_recipe_are_noticed(folder):
    append(folder, *lines(30))
    run = Followed(folder)
    run.look()
    assert run.story.complete
    (folder / "recipe.toml").write_text(Recipe().to_toml().replace("rounds = 30", "rounds = 40"))
    run.look()
    assert (run.story.complete, run.story.rounds) == (False, 40)


@pytest.mark.parametrize("damage", [b"not JSON\n", b"[1]\n", b'{"rounds": 3}\n'])
def test_a_whole_line_that_is_no_record_is_named(folder, damage):
    append(folder, *lines(2), damage)
    with pytest.raises(RunError, match=r"metrics.jsonl: holds a line that is not the record of a round"):
        Followed(folder).look()


def test_a_recipe_that_cannot_be_read_and_a_file_in_place_of_a_directory_are_named(folder):
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be read .* give a run's directory"):
        Followed(folder / "metrics.jsonl").look()
    (folder / "recipe.toml").write_text("[server]\nround = 3\n")
    with pytest.raises(RunError, match=r"recipe.toml: cannot be read .*did you mean server.rounds"):
        Followed(folder).look()
