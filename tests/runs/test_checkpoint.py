"""Checkpoints: what they hold, how few are kept, and that no damage goes unseen."""

import hashlib
import json
import runpy
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from typer.testing import CliRunner

from fedflat.cli import app
from fedflat.engine.store import Memory
from fedflat.errors import RunError
from fedflat.recipe import Recipe, load
from fedflat.rounds.state import ServerState
from fedflat.runs import checkpoint, manifest
from fedflat.runs.build import prepare
from fedflat.runs.checkpoint import Checkpoints, fingerprint
from fedflat.runs.experiment import execute
from fedflat.runs.folder import read_recipe
from fedflat.runs.loading import load_run
from fedflat.runs.manifest import verified

TINY = ["method=scaffold", "model.hidden=[8]", "split.clients=6", "server.cohort=2", "server.rounds=4", "local.steps=2",
        "checkpoint.every=1", "engine=inline"]  # fmt: skip
outcome = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "crash.py"))["outcome"]


def settle(folder, *changes, resume=False, warn=None):
    """A run, from its beginning or from where it stopped; what it warns of is an error unless it is wanted."""
    problem = prepare(load(None, [*TINY, *changes]))
    return execute(problem, folder, resume=resume, warn=warn or pytest.fail)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody touches."""
    folder = tmp_path_factory.mktemp("whole")
    settle(folder)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it to be damaged."""
    return shutil.copytree(whole, tmp_path / "run")


def newest(folder):
    """The round that would be gone on from, and what is said of damage; no tensor is looked at meanwhile."""
    damages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "from_safetensors", lambda content: pytest.fail("a tensor was used"))
        found = Checkpoints(folder, read_recipe(folder)).newest(lambda mark: True, damages.append)
    return found.round, damages


def own(folder):
    """The files that only the last checkpoint has: its manifest, the server's and the memory that changed."""
    return sorted(folder.glob("checkpoints/00000004.*"))


def rewrite(manifest, **changes):
    """Another manifest, whole and signed."""
    content = {k: v for k, v in json.loads(manifest.read_text()).items() if k != "sha256"} | changes
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**content, "sha256": digest}, sort_keys=True) + "\n")


def test_a_manifest_names_the_round_the_recipe_the_metrics_and_every_file_by_its_digest(whole):
    manifest = json.loads((whole / "checkpoints/00000004.json").read_text())
    metrics = (whole / "metrics.jsonl").read_bytes()
    assert (manifest["schema"], manifest["round"]) == (2, 4)
    assert manifest["recipe"] == fingerprint(read_recipe(whole))
    assert manifest["metrics"] == {"bytes": len(metrics), "sha256": hashlib.sha256(metrics).hexdigest()}
    files = {manifest["server"]["file"]: manifest["server"], **manifest["memory"]}
    assert len(files) > 2
    for name, entry in files.items():
        assert hashlib.sha256((whole / "checkpoints" / name).read_bytes()).hexdigest() == entry["sha256"]


@contextmanager
def damaged(path, content):
    """A file with another content, for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    yield
    path.write_bytes(before)


@settings(max_examples=200, deadline=None)
@given(chosen=st.integers(0, 2), place=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_byte_that_changed_is_seen_and_the_checkpoint_before_is_taken(whole, chosen, place, flip):
    path = own(whole)[chosen]
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    with damaged(path, content):
        round, (damage,) = newest(whole)
    assert (round, damage.startswith(f"{path}: ")) == (3, True)


@settings(max_examples=50, deadline=None)
@given(chosen=st.integers(0, 2), length=st.integers(0, 10**6))
def test_a_file_that_was_cut_off_is_seen_and_the_checkpoint_before_is_taken(whole, chosen, length):
    path = own(whole)[chosen]
    with damaged(path, path.read_bytes()[: length % path.stat().st_size]):
        round, (damage,) = newest(whole)
    assert (round, damage.startswith(f"{path}: ")) == (3, True)


def test_a_file_that_is_empty_gone_or_cannot_be_read_is_named(run):
    for path in own(run):
        content = path.read_bytes()
        path.write_bytes(b"")
        assert newest(run)[0] == 3
        path.unlink()
        path.mkdir()
        round, (damage,) = newest(run)
        assert (round, f"{path}: cannot be read" in damage) == (3, True)
        path.rmdir()
        assert newest(run)[0] == 3
        path.write_bytes(content)
    assert newest(run) == (4, [])


def test_an_older_schema_and_a_checkpoint_of_another_recipe_are_passed_over(run):
    manifest = run / "checkpoints/00000004.json"
    rewrite(manifest)
    assert newest(run) == (4, [])
    rewrite(manifest, schema=0)
    assert "00000004.json: has schema 0, and this version of fedflat reads 1 and 2" in newest(run)[1][0]
    rewrite(manifest, schema=2, recipe="0" * 64)
    assert "00000004.json: is of another recipe" in newest(run)[1][0]


def test_a_run_whose_last_checkpoint_is_damaged_still_ends_the_same(run, whole):
    server = run / "checkpoints/00000004.server.safetensors"
    server.write_bytes(server.read_bytes()[::-1])
    damages = []
    settle(run, resume=True, warn=damages.append)
    assert damages == [f"{server}: is damaged; the checkpoint before it is taken"]
    assert outcome(run) == outcome(whole)


def test_where_no_checkpoint_is_whole_the_run_says_so_and_touches_nothing(run):
    for path in run.glob("checkpoints/*.server.safetensors"):
        path.write_bytes(b"")
    metrics = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        RunError, match=r"checkpoints: none of the \d checkpoints can be used; start again in another directory"
    ):
        settle(run, resume=True, warn=lambda damage: None)
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_metrics_are_cut_off_where_the_checkpoint_was_written(run, whole):
    for path in own(run):
        path.unlink()
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"round": 5, "acc')
    settle(run, resume=True)
    assert outcome(run) == outcome(whole)


def test_metrics_that_are_not_those_of_the_checkpoint_lead_to_the_one_before(run, whole):
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:3]) + lines[3].replace(b"round", b"ruond"))
    damages = []
    settle(run, resume=True, warn=damages.append)
    assert ["00000004.json: metrics.jsonl is not the one that it was written beside" in d for d in damages] == [True]
    assert outcome(run) == outcome(whole)


def state(round, weights=None):
    vector = torch.full((3,), float(round)) if weights is None else weights
    return ServerState(vector, torch.zeros(0), {"control": -vector}, round)


def save(checkpoints, round, memory=None, accuracy=None):
    checkpoints.save(state(round), memory, {"bytes": 0, "sha256": ""}, accuracy)


def rounds_of(folder):
    return [int(path.stem) for path in sorted(folder.glob("checkpoints/[0-9]*.json"))]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(accuracies=st.lists(st.sampled_from([None, 0.1, 0.5, 0.9]), min_size=1, max_size=6))
def test_the_last_two_checkpoints_and_the_best_are_kept_and_no_other_file(tmp_path_factory, accuracies):
    folder = tmp_path_factory.mktemp("few")
    checkpoints = Checkpoints(folder, Recipe())
    for round, accuracy in enumerate(accuracies, 1):
        save(checkpoints, round, accuracy=accuracy)
    scored = [(-accuracy, round) for round, accuracy in enumerate(accuracies, 1) if accuracy is not None]
    last = len(accuracies)
    assert rounds_of(folder) == sorted({max(last - 1, 1), last} | {round for _, round in sorted(scored)[:1]})
    assert len([*folder.glob("checkpoints/*")]) == 2 * len(rounds_of(folder))


def test_checkpoints_that_are_of_no_use_do_not_push_out_those_that_are(tmp_path):
    checkpoints = Checkpoints(tmp_path, Recipe())
    for round in range(1, 7):
        save(checkpoints, round, accuracy=float(round == 2))
    assert rounds_of(tmp_path) == [2, 5, 6]
    for round in (5, 6):
        (tmp_path / f"checkpoints/{round:08}.server.safetensors").write_bytes(b"")
    again = Checkpoints(tmp_path, Recipe())
    assert again.newest(lambda mark: True, lambda damage: None).round == 2
    save(again, 3)
    assert rounds_of(tmp_path) == [2, 3]
    save(again, 5)
    assert rounds_of(tmp_path) == [2, 3, 5]


def test_a_state_comes_back_to_the_bit_and_where_the_run_computes(tmp_path):
    save(Checkpoints(tmp_path, Recipe()), 7)
    kept = verified(tmp_path / "checkpoints/00000007.json")
    back = kept.state(state(0))
    assert (back.round, back.weights.tolist(), back.vectors["control"].tolist()) == (7, [7.0] * 3, [-7.0] * 3)
    assert kept.state(state(0, torch.zeros(3, device="meta"))).weights.is_meta


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cohorts=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6))
def test_memory_comes_back_to_the_bit_from_no_more_than_twice_its_rows(tmp_path_factory, cohorts):
    folder = tmp_path_factory.mktemp("memory")
    memory, checkpoints = Memory(folder, 6, {"drift": 3}, torch.float32), Checkpoints(folder, Recipe())
    for round, cohort in enumerate(cohorts, 1):
        for client in cohort:
            memory.keep(client, {"drift": torch.tensor([client, round, 0.1])})
        save(checkpoints, round, memory)
        kept = verified(folder / f"checkpoints/{round:08}.json")
        held = {client: memory[client]["drift"].tolist() for client in range(6) if memory[client]}
        assert {client: vectors["drift"].tolist() for client, vectors in kept.memory()} == held
        assert sum(bundle["rows"] for bundle in kept.manifest["memory"].values()) <= 2 * len(held)


def test_only_the_memory_that_changed_is_written_until_old_rows_are_too_many(tmp_path):
    memory, checkpoints = Memory(tmp_path, 4, {"drift": 3}, torch.float32), Checkpoints(tmp_path, Recipe())
    holds = []
    for round, cohort in enumerate([(0, 1, 2, 3), (0, 1, 2), (0, 1)], 1):
        for client in cohort:
            memory.keep(client, {"drift": torch.zeros(3)})
        save(checkpoints, round, memory)
        manifest = verified(tmp_path / f"checkpoints/{round:08}.json").manifest
        bundles = manifest["memory"].items()
        holds.append({int(name[:8]): (bundle["clients"], bundle["rows"]) for name, bundle in bundles})
    assert holds[0] == {1: ([0, 1, 2, 3], 4)}
    assert holds[1] == {1: ([3], 4), 2: ([0, 1, 2], 3)}
    # 4 + 3 + 2 rows for four clients are more than twice as many: client 3 moves, and the oldest file goes.
    assert holds[2] == {2: ([2], 3), 3: ([0, 1, 3], 3)}


def test_much_memory_goes_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUNDLE", 2 * 3 * 4)
    memory = Memory(tmp_path, 5, {"drift": 3}, torch.float32)
    for client in range(5):
        memory.keep(client, {"drift": torch.zeros(3)})
    save(Checkpoints(tmp_path, Recipe()), 1, memory)
    manifest = verified(tmp_path / "checkpoints/00000001.json").manifest
    assert [bundle["clients"] for bundle in manifest["memory"].values()] == [[0, 1], [2, 3], [4]]


def test_a_checkpoint_can_be_measured_as_the_run_was_then(run, tmp_path):
    settle(tmp_path / "short", "server.rounds=3")
    manifest = run / "checkpoints/00000003.json"
    then = load_run(manifest)
    short = load_run(tmp_path / "short")
    assert torch.equal(then.network.weights, short.network.weights)
    command = ["flatness", str(manifest), str(tmp_path / "short"), "--samples", "100", "--json"]
    measured = json.loads(CliRunner().invoke(app, command).stdout)["runs"]
    assert measured[0]["spectrum"] == measured[1]["spectrum"]
    (run / "checkpoints/00000003.server.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"00000003\.server\.safetensors: is damaged; give another checkpoint"):
        load_run(manifest)


def test_what_a_user_keeps_beside_the_checkpoints_stays_and_stops_nothing(tmp_path):
    mine = tmp_path / "checkpoints"
    (mine / "backup").mkdir(parents=True)
    (mine / "backup/00000001.json").write_text("mine")
    (mine / "00000099.memory.0.safetensors").mkdir()
    for name in ("notes.txt", "best.json", "model.safetensors", ".hidden", "00000001.server.safetensors.bak"):
        (mine / name).write_text("mine")
    (mine / ".00000001.json.4194305").write_text("half of what a killed process wrote")
    before = {path: path.is_dir() or path.read_bytes() for path in mine.rglob("*")}
    damages = []
    settle(tmp_path, resume=True, warn=damages.append)
    assert damages == []
    settle(tmp_path, "server.rounds=6", resume=True, warn=damages.append)
    assert damages == [] and rounds_of(tmp_path)[-2:] == [5, 6]
    before.pop(mine / ".00000001.json.4194305")
    assert {path: path.is_dir() or path.read_bytes() for path in before} == before
    assert not (mine / ".00000001.json.4194305").exists()


@pytest.mark.parametrize("where", [0.0, 0.1, 0.3, 0.6])
def test_a_bit_that_flipped_in_the_metrics_costs_a_record_at_most_and_no_checkpoint(run, whole, where):
    metrics = run / "metrics.jsonl"
    content = bytearray(metrics.read_bytes())
    content[int(where * len(content))] ^= 0x10
    metrics.write_bytes(content)
    damages = []
    settle(run, "server.rounds=5", resume=True, warn=damages.append)
    lines = metrics.read_bytes().splitlines()
    assert json.loads(lines[-1])["round"] == 5
    assert all(json.loads(line)["round"] for line in lines) and len(lines) >= 4
    if any("metrics.jsonl: is damaged, but the weights of round" in damage for damage in damages):
        assert (run / "metrics.damaged.jsonl").read_bytes() == content
    settle(run.parent / "straight", "server.rounds=5")
    assert (run / "model.safetensors").read_bytes() == (run.parent / "straight/model.safetensors").read_bytes()
    assert json.loads((run / "summary.json").read_text())["rounds"] == 5
    settle(run, "server.rounds=6", resume=True)  # and from now on nothing is said of it


def test_metrics_that_are_gone_or_somebodys_poem_do_not_cost_the_weights_either(run, whole):
    for content in (b"", b"\x00\xff\n{}\n" + b"[" * 100_000 + b'\n{"round": "1"}\n'):
        (run / "metrics.jsonl").write_bytes(content)
        damages = []
        settle(run, resume=True, warn=damages.append)
        assert "4 records could not be read" in damages[-1]
        assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_goes_back_to_any_kept_checkpoint_and_ends_the_same(run, whole):
    kept = rounds_of(run)
    for round in kept:
        copy = shutil.copytree(run, run.parent / f"from-{round}")
        told = []
        problem = prepare(load(None, TINY))
        execute(problem, copy, [told.append], resume=True, warn=pytest.fail, back_to=round)
        assert [record["round"] for record in told] == [*range(round + 1, 5)]
        assert outcome(copy) == outcome(whole)


def test_what_came_after_it_is_forgotten_even_if_the_next_round_is_never_reached(run):
    class PowerCutError(Exception):
        pass

    def cut(record):
        raise PowerCutError

    problem = prepare(load(None, TINY))
    first = min(rounds_of(run))
    with pytest.raises(PowerCutError):
        execute(problem, run, [cut], resume=True, warn=pytest.fail, back_to=first)
    assert rounds_of(run) == [first]
    assert newest(run) == (first, [])


def test_a_round_without_a_checkpoint_or_with_a_damaged_one_is_named_and_nothing_changes(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    there = ", ".join(map(str, rounds_of(run)))
    done = CliRunner().invoke(app, ["resume", str(run), "--from", "77"])
    assert str(done.exception) == f"--from 77: no checkpoint of that round is kept; there are those of {there}"
    server = run / "checkpoints/00000003.server.safetensors"
    with damaged(server, b""):
        done = CliRunner().invoke(app, ["resume", str(run), "--from", "3"])
        assert "none of the 1 checkpoints can be used" in str(done.exception)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    done = CliRunner().invoke(app, ["resume", str(run), "--from", "3", "--set", "server.rounds=3"])
    assert done.exit_code == 0 and len((run / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("name", ["../../../secret.safetensors", "/etc/passwd", "00000004.json", "x\n"])
def test_a_manifest_cannot_name_a_file_elsewhere(run, name):
    manifest = run / "checkpoints/00000004.json"
    rewrite(manifest, server={"file": name, "sha256": "0" * 64})
    assert "which is not a file of a checkpoint" in newest(run)[1][0]


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {}},
        {"metrics": {"bytes": -1, "sha256": ""}},
        {"server": {}},
        {"memory": []},
        {"memory": {"x": {}}},
        {"round": "4"},
        {"round": -4},
        {"recipe": None},
        {"accuracy": "best"},
    ],
    ids=str,
)
def test_a_signed_manifest_of_another_form_is_passed_over(run, change):
    rewrite(run / "checkpoints/00000004.json", **change)
    assert "00000004.json: is not of the form of a checkpoint" in newest(run)[1][0]


def forged(manifest, tensors):
    """A checkpoint of somebody's making: whole, signed, and of another form."""
    file = manifest.with_name("00000004.server.safetensors")
    file.write_bytes(tensors if isinstance(tensors, bytes) else safetensors_bytes(tensors))
    rewrite(manifest, server={"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()})


@pytest.mark.parametrize("kind", ["nothing", "other sizes", "not finite", "no safetensors"])
def test_a_forged_checkpoint_ends_in_a_sentence(run, kind):
    manifest = run / "checkpoints/00000004.json"
    tensors = load_file(run / "checkpoints/00000004.server.safetensors")
    others = {
        "nothing": {},
        "other sizes": {name: torch.zeros(3) for name in tensors},
        "not finite": {name: tensor * float("nan") for name, tensor in tensors.items()},
        "no safetensors": b"\xff" * 100,
    }
    forged(manifest, others[kind])
    with pytest.raises(RunError, match=r"0000004.*(does not fit|are not finite|cannot be read)"):
        load_run(manifest)
    with pytest.raises(RunError, match=r"0000004.*(does not fit|are not finite|cannot be read)"):
        settle(run, resume=True)


def test_a_model_that_is_not_the_runs_own_is_refused_wherever_it_is_read(run):
    model = run / "model.safetensors"
    tensors = load_file(model)
    honest = model.read_bytes()
    model.write_bytes(safetensors_bytes({name: tensor + 1 for name, tensor in tensors.items()}))
    for command in ("flatness", "landscape", "duality", "personalize", "export"):
        done = CliRunner().invoke(app, [command, str(run)])
        assert "model.safetensors: is not the model that summary.json describes" in str(done.exception)
    model.write_bytes(honest)
    load_run(run)
    for content in ("{}", "[]", "", "[" * 100_000):
        (run / "summary.json").write_text(content)
        with pytest.raises(RunError, match=r"summary\.json: is damaged"):
            load_run(run)
    settle(run, resume=True)
    load_run(run)


def test_weights_that_are_not_finite_are_named(run):
    tensors = {name: tensor * float("nan") for name, tensor in load_file(run / "model.safetensors").items()}
    blob = safetensors_bytes(tensors)
    (run / "model.safetensors").write_bytes(blob)
    summary = json.loads((run / "summary.json").read_text()) | {"model_sha256": hashlib.sha256(blob).hexdigest()}
    (run / "summary.json").write_text(json.dumps(summary))
    for command in ("flatness", "landscape", "duality", "personalize", "export"):
        done = CliRunner().invoke(app, [command, str(run)])
        assert "model.safetensors holds weights that are not finite" in str(done.exception)
