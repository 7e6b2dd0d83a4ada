"""A few hundred cases of benchmarks/fuzz.py, and those that once broke its invariant."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
fuzzing = pytest.importorskip("fuzzing")
pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {"recipe": 25, "broadcast": 1, "question": 1, "query": 1, "upload": 25, "hello": 15, "answer": 10, "model": 12}
WIRE = ("upload", "hello", "answer", "broadcast", "question", "query")
BROKEN = ("crash", "too slow", "no sentence")


@pytest.fixture(scope="module")
def federations(tmp_path_factory):
    """One deployment for all targets of the wire; it takes seconds to begin."""
    wire = sys.modules["fuzzing.wire"]
    return [wire.Federation(tmp_path_factory.mktemp("wire"), "scaffold + fednova")]


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_what_is_spoilt_is_one_sentence_or_a_correct_result(name, tmp_path, federations):
    kind = fuzzing.TARGETS[name]
    if name in WIRE:
        target = kind.__new__(kind)
        target.federations = federations
    else:
        target = kind(tmp_path / "work")
    verdicts = [fuzzing.judged(target, name, 7, case) for case in range(CASES.get(name, 20))]
    assert [verdict.fault for verdict in verdicts if verdict.fault] == []
    assert not any(verdict.outcome.startswith(BROKEN) for verdict in verdicts)


def test_the_judge_finds_a_crash_an_empty_sentence_and_what_takes_too_long(monkeypatch):
    from fedflat.errors import RecipeError

    class Target:
        def __init__(self, what):
            self.case = what

    def raises(error):
        def case(chance):
            raise error

        return Target(case)

    def endless(chance):
        while True:
            pass

    monkeypatch.setattr(sys.modules["fuzzing.judge"], "SECONDS", 1)
    found = [raises(KeyError("x")), raises(RecipeError("")), Target(endless), Target(lambda c: bytearray(2**40)),
             raises(RecipeError("a sentence"))]  # fmt: skip
    outcomes = [fuzzing.judged(target, "x", 0, 0).outcome for target in found]
    assert outcomes == ["crash: KeyError", "no sentence", "too slow", "crash: MemoryError", "RecipeError"]


def test_a_case_can_be_had_again(tmp_path):
    first, second = (fuzzing.TARGETS["idx"](tmp_path / name) for name in "ab")
    fuzzing.judged(first, "idx", 3, 5)
    fuzzing.judged(second, "idx", 3, 5)
    assert first.path.read_bytes() == second.path.read_bytes()


# --------------------------------------------------------------------------------------------------------------------
# What it has found
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["a." * 50_000 + "b = 1", "[" + "a." * 50_000 + "b]", "x = {" + "a." * 50_000 + "b = 1}"]
)
def test_a_key_of_many_parts_does_not_take_minutes(key, tmp_path):
    from fedflat.errors import FedflatError
    from fedflat.flower.policy import read_policy
    from fedflat.recipe import load

    (tmp_path / "x.toml").write_text(key)
    for read in (load, read_policy):
        with pytest.raises(FedflatError, match="a line has more than 200 dots"):
            read(tmp_path / "x.toml")


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[" * 100_000, b'{"recipes": 5}', b'{"spent": true}', b'{"last": 5}', b'{"recipes": {"x": 1}}',
     b'{"spent": 1' + b"0" * 400 + b"}"],
)  # fmt: skip
def test_a_ledger_of_another_form_is_damaged_in_a_sentence(content, tmp_path):
    from fedflat.flower.policy import PolicyError
    from fedflat.flower.tally import DiskBook

    (tmp_path / "client-0.json").write_bytes(content)
    (tmp_path / "client-0.json").chmod(0o600)  # another user's ledger is refused before it is read
    with pytest.raises(PolicyError, match="ledger is damaged"), DiskBook(tmp_path, 0).opened():
        pass
    assert (tmp_path / "client-0.json").read_bytes() == content


@pytest.mark.parametrize("content", [b"[]", b"5", b"[" * 100_000, b"{}", b'{"run": "x", "sizes": {}, "marks": {}}'])
def test_a_journal_of_another_form_is_a_sentence(content, tmp_path):
    from fedflat.errors import RunError
    from fedflat.flower.journal import Journal

    (tmp_path / "deployment.json").write_bytes(content)
    with pytest.raises(RunError, match="cannot be read"):
        Journal(tmp_path)


@pytest.mark.parametrize("field", ["accuracy", "bytes_up", "seconds", "cohort", "refused", "notes", "class_accuracy"])
@pytest.mark.parametrize("value", [{"a": 1}, [[1]], "x", True])
def test_a_record_whose_fields_are_of_another_kind_is_none(field, value):
    from fedflat.runs import read_record

    record = {"round": 1, "bytes_down": 1, "bytes_up": 1, "seconds": 0.5}
    assert read_record(json.dumps(record).encode()) == record
    assert read_record(json.dumps({**record, field: value}).encode()) is None or (field, value) == ("notes", {"a": 1})


@pytest.mark.parametrize("field", ["bytes_up", "bytes_down", "seconds"])
@pytest.mark.parametrize("value", ["null", "NaN", "Infinity"])
def test_a_record_without_a_number_that_is_summed_is_none(field, value):
    from fedflat.runs import read_record

    record = json.dumps({"round": 1, "bytes_down": 1, "bytes_up": 1, "seconds": 0.5, field: 7.25})
    assert read_record(record.encode()) and read_record(record.replace("7.25", value).encode()) is None


@pytest.mark.parametrize(
    "forged",
    [{"accuracy_last": "high"}, {"accuracy_best": [1], "accuracy_best_round": 1}, {"versions": 5}, {"rounds": "3"},
     {"versions": {"torch": None}}, {"accuracy_mean_of_last_10": {}}, {"refused": [1]}],
)  # fmt: skip
def test_a_summary_whose_fields_are_of_another_kind_is_damaged_in_a_sentence(forged, tmp_path):
    """`fedflat export` quotes the summary in its card."""
    from fedflat.errors import RunError
    from fedflat.runs.record import read_summary

    sound = {"rounds": 3, "method": "fedavg", "seed": 2**70, "accuracy_last": 0.5, "accuracy_best": None,
             "model_sha256": "0" * 64, "versions": {"torch": "2"}, "refused": {"norm": 2}, "stopped": True}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(sound))
    assert read_summary(tmp_path) == sound
    for text in (json.dumps(sound | forged), "[" * 100_000, "[]", json.dumps({"rounds": 3})):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(RunError, match=r"summary.json: is damaged"):
            read_summary(tmp_path)


def test_results_nested_a_thousand_times_are_a_sentence(tmp_path):
    from fedflat.errors import RunError
    from fedflat.runs import read_rows

    (tmp_path / "results.jsonl").write_text("[" * 100_000)
    with pytest.raises(RunError, match="a line is not a valid result"):
        read_rows(tmp_path)


def test_a_curve_that_is_not_finite_is_drawn():
    from fedflat.report.watch import sparkline

    assert (
        sparkline([0.0, float("inf")], 9) == sparkline([0.0, float("nan")], 9) == sparkline([-1e308, 1e308], 9) == "▁█"
    )


def test_labels_of_other_shapes_or_kinds_are_a_sentence(tmp_path):
    import numpy as np

    from fedflat.errors import DataError
    from fedflat.federation.formats import read_medmnist

    sound = {f"{part}_{what}": np.zeros((4, 8, 8) if what == "images" else (4, 1), np.uint8)
             for part in ("train", "val", "test") for what in ("images", "labels")}  # fmt: skip
    for odd in (np.zeros(()), np.zeros((4, 2)), np.zeros((0, 5)), np.zeros((4, 1), "V4"), np.zeros((4, 1), "M8[s]")):
        np.savez(tmp_path / "x.npz", **{**sound, "val_labels": odd})
        with pytest.raises(DataError):
            read_medmnist(tmp_path / "x.npz", 8)


def test_what_a_file_says_reaches_the_terminal_without_escape_sequences(capsys):
    from fedflat.cli.app import complain

    complain("recipe.toml: \x1b[2J\x1b]0;owned\x07 is unknown" + "x" * 100_000)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "\x07" not in shown and len(shown) < 5000
