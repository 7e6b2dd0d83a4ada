"""A deployment that goes back to a kept checkpoint: the server's marks, the clients' memory and ε go with it."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from fedflat.cli import app
from fedflat.methods import parse
from fedflat.rounds.accountant import ledger
from fedflat.runs import RunLock

pytest.importorskip("flwr")
journal = pytest.importorskip("fedflat.flower.journal")
pytestmark = pytest.mark.filterwarnings("ignore")
LONG = ("server.rounds=3", "split.clients=2", "server.cohort=2")
TINY_STEP = ("method=scaffold", "local.lr=1e-9", *LONG)


def go_back(out, round):
    return CliRunner().invoke(app, ["resume", str(out), "--from", str(round)])


def kept(out):
    return sorted(int(path.stem) for path in (out / "checkpoints").glob("*.json"))


def test_without_memory_on_clients_it_ends_the_same_from_any_kept_checkpoint(deployed, tmp_path, small):
    recipe = small(*TINY_STEP, "method=fedavg")
    whole = deployed(recipe)
    for round in kept(tmp_path / "out"):
        done = go_back(tmp_path / "out", round)
        assert (done.exit_code, "is back at round" in done.output) == (0, True)
        assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == round
        assert deployed(recipe) == whole


def test_one_round_back_clients_have_the_memory_of_then_and_it_ends_the_same(deployed, tmp_path, small):
    recipe = small("method=scaffold", *LONG)
    config = {"memory": str(tmp_path / "memory")}
    whole = deployed(recipe, **config)
    assert go_back(tmp_path / "out", 2).exit_code == 0
    assert deployed(recipe, **config) == whole


def back_at_the_first(deployed, tmp_path, recipe):
    """Run three rounds, and go back to the first one: with so small a step all are equally good, so it is the best."""
    deployed(recipe, memory=str(tmp_path / "memory"))
    assert kept(tmp_path / "out") == [1, 2, 3], "the last two and the best"
    assert go_back(tmp_path / "out", 1).exit_code == 0
    assert kept(tmp_path / "out") == [1]


def test_further_back_clients_whose_memory_is_newer_are_refused_and_keep_it(deployed, tmp_path, small):
    recipe = small(*TINY_STEP)
    back_at_the_first(deployed, tmp_path, recipe)
    _, records = deployed(recipe, memory=str(tmp_path / "memory"))
    refused = [refusal for record in records for refusal in record.get("refused", ())]
    assert len(refused) == 4 and {refusal["reason"] for refusal in refused} == {"raised"}
    assert all("its memory of round 0 is missing; restore it" in refusal["detail"] for refusal in refused)
    newer = {path.name for path in (tmp_path / "memory").rglob("0*.safetensors")}
    assert newer == {"00000001.safetensors", "00000002.safetensors"}


def test_with_a_backup_of_their_memory_it_ends_the_same(deployed, tmp_path, small, cut_in):
    recipe, memory = small(*TINY_STEP), tmp_path / "memory"
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(1), memory=str(memory))
    shutil.copytree(memory, tmp_path / "backup")
    whole = deployed(recipe, memory=str(memory))
    assert go_back(tmp_path / "out", 1).exit_code == 0
    shutil.rmtree(memory)
    shutil.copytree(tmp_path / "backup", memory)
    assert deployed(recipe, memory=str(memory)) == whole


def test_or_they_begin_anew_and_the_log_says_so(deployed, tmp_path, small, capsys):
    recipe = small(*TINY_STEP, "deployment.memory=anew")
    back_at_the_first(deployed, tmp_path, recipe)
    _, records = deployed(recipe, memory=str(tmp_path / "memory"))
    assert [record["cohort"] for record in records] == [[0, 1]] * 3
    assert capsys.readouterr().out.count("its memory of round 0 is missing; it started without memory") == 2


def test_a_mark_of_a_round_that_the_run_went_back_behind_is_never_given(tmp_path):
    """Client 1 is not in the rounds that are run again: its mark of round 2 must not become valid in round 3."""
    book = journal.Journal(tmp_path)
    book.begin({0: 5, 1: 5})
    marks = [journal.Mark(round, f"{round:064x}") for round in range(4)]
    (tmp_path / "checkpoints").mkdir()
    for mark in marks:
        book.merged({0: mark, 1: mark})
        (tmp_path / "checkpoints" / f"{mark.round + 1:08}.json").touch()
    again = journal.Journal(tmp_path)
    again.start(2)
    again.merged({0: marks[2]})
    assert again.mark(0, 3) == marks[2]
    assert again.mark(1, 3) == again.mark(1, 9) == journal.Journal(tmp_path).mark(1, 9) == marks[1]


def test_marks_are_kept_for_the_checkpoints_that_are(tmp_path):
    book = journal.Journal(tmp_path)
    book.begin({0: 5})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/00000002.json").touch()
    for round in range(50):
        book.merged({0: journal.Mark(round, f"{round:064x}")})
    assert [book.mark(0, before).round for before in (2, 50)] == [1, 49]
    assert len(json.loads((tmp_path / "deployment.json").read_text())["marks"]["0"]) == 2


def test_epsilon_counts_the_rounds_that_were_discarded(deployed, tmp_path, small):
    recipe = small("method=local_dp(clip=0.5, noise=8.0, entropy='system')", *LONG)
    _, records = deployed(recipe)
    assert go_back(tmp_path / "out", 2).exit_code == 0
    _, again = deployed(recipe)
    assert again[:2] == records[:2]
    assert records[2]["epsilon"] < again[2]["epsilon"] == ledger(parse(str(recipe.method)), recipe, 2).epsilon(4)


def test_a_round_that_is_not_kept_or_a_run_in_use_changes_nothing(deployed, tmp_path, small):
    deployed(small(*LONG, "server.rounds=1"))
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert "--from 77: no checkpoint of that round is kept" in str(go_back(tmp_path / "out", 77).exception)
    with RunLock(tmp_path / "out"):
        assert "another process is working on this run" in str(go_back(tmp_path / "out", 1).exception)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
