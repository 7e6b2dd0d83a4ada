"""What is shown of a run that is going on: what its records add up to, on a screen, in a line, as JSON."""

import io
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedflat.recipe import load
from fedflat.report.watch import LEVELS, Story, line, screen, sparkline

REASONS = ("raised", "hung", "norm")
numbers = st.floats(-1e6, 1e6)
refusals = st.lists(
    st.fixed_dictionaries({"client": st.integers(0, 99), "reason": st.sampled_from(REASONS), "detail": st.text()})
)


def story(records, rounds=40):
    told = Story("runs/7", load(None, [f"server.rounds={rounds}", 'method="fedsam(0.05) + man(0.15)"']))
    for record in records:
        told.add(record)
    return told


def record(round, **values):
    return {"round": round, "cohort": [1, 4], "bytes_down": 10, "bytes_up": 7, "seconds": 0.5, **values}


def eventful():
    """Twenty of forty rounds with everything that a record can hold."""
    why = "ValueError while training: no sample of class 3 in this batch (client.py, line 33)"
    for round in range(1, 21):
        found = record(round, cohort=[*range(30)], accuracy=round / 40, loss=2 / round, epsilon=round / 10)
        if round % 5 == 0:
            found |= {"lambda1": 50 / round, "sharpness_bytes": 1_000_000}
            found |= {"refused": [{"client": round, "reason": "raised", "detail": why}]}
        yield found | ({"skipped": "0 accepted, admission.quorum = 1"} if round == 15 else {})


def shown(told, width):
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(screen(told, width))
    return [text.rstrip() for text in console.export_text().splitlines()]


@given(st.lists(numbers, max_size=100), st.integers(0, 60))
def test_a_sparkline_has_a_column_for_each_value_until_they_are_too_many(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)


@given(st.lists(numbers, min_size=2, max_size=40, unique=True))
def test_a_sparkline_orders_its_columns_as_the_values(values):
    levels = [LEVELS.index(character) for character in sparkline(values, 40)]
    assert (levels[values.index(min(values))], levels[values.index(max(values))]) == (0, len(LEVELS) - 1)
    in_order = [level for _, level in sorted(zip(values, levels, strict=True))]
    assert in_order == sorted(in_order)


@given(st.integers(1, 300), st.floats(-5, 5))
def test_a_curve_that_does_not_move_is_a_level_line(count, value):
    assert len(set(sparkline([value] * count, 30))) == 1


@given(st.lists(refusals, max_size=12))
def test_refusals_are_counted_by_reason_and_the_last_ones_kept(rounds):
    told = story(record(number, refused=refused) for number, refused in enumerate(rounds, 1))
    everyone = [{"round": number, **each} for number, refused in enumerate(rounds, 1) for each in refused]
    assert told.refused == Counter(each["reason"] for each in everyone)
    assert list(told.refusals) == everyone[-4:]


@given(st.lists(st.none() | st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=12))
def test_the_best_accuracy_is_the_first_of_the_highest(accuracies):
    told = story(record(number, accuracy=accuracy) for number, accuracy in enumerate(accuracies, 1))
    highest = max((accuracy for accuracy in accuracies if accuracy is not None), default=None)
    assert told.best == (None if highest is None else (accuracies.index(highest) + 1, highest))


def test_the_time_left_is_that_of_the_rounds_left_at_the_pace_of_the_last_twenty():
    told = story([record(1, seconds=1000.0), *(record(number, seconds=3.0) for number in range(2, 22))], rounds=51)
    assert (told.pace, told.seconds_left) == (3.0, 90.0)
    assert line(told).endswith("3 s a round, 1:30 left")
    hours = story([record(1, seconds=60.0)], rounds=100)
    assert line(hours).endswith("60 s a round, 1:39:00 left")


@pytest.mark.parametrize("width", [60, 100])
def test_a_screen_tells_everything_within_its_width(width):
    lines = shown(story(eventful()), width)
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    for part in (
        "runs/7 fedsam(0.05) + man(0.15)",
        "mlp on digits, 20 clients",
        "20/40 0.5 s a round, 0:10 left",
        "accuracy 0.5000, best 0.5000 in round 20 ▁",
        "loss 0.1",
        "λ₁ 2.5 after round 20 █",
        "ε 2",
        "cohort 30: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …",
        "4 MB for λ₁",
        "refused 4 in all: 4 raised",
        "round 20, client 20: raised: ValueError while training: no sample of class 3",
        "skipped 1 in all; round 15: 0 accepted, admission.quorum = 1",
    ):
        assert part in text


def test_what_a_run_does_not_measure_is_not_on_its_screen():
    text = "\n".join(shown(story([record(1, accuracy=None, loss=0.25)]), 80))
    assert "loss" in text
    for absent in ("accuracy", "λ₁", "ε", "refused", "skipped"):
        assert absent not in text


def test_a_long_reason_does_not_fill_the_screen_and_no_markup_is_read_into_it():
    refused = [{"client": 3, "reason": "raised", "detail": "[red]no[/] " + "words " * 500}]
    lines = shown(story([record(1, refused=refused)]), 60)
    assert len(lines) < 12
    assert any("[red]no[/]" in text for text in lines)


def test_before_the_first_round_and_after_the_last_it_says_so():
    assert line(story([])).endswith("round 0/40  no round yet")
    assert line(story([record(number) for number in range(1, 41)])).endswith("round 40/40  finished")


def test_a_run_that_has_long_been_silent_is_said_to_be():
    told = story([record(1, seconds=10.0)])
    told.silent = 49.0
    assert "left" in line(told)
    told.silent = 125.0
    assert line(told).endswith("no update for 2:05")


def test_a_snapshot_survives_json_and_has_the_last_of_every_number():
    found = json.loads(json.dumps(story(eventful()).snapshot()))
    expected = {"round": 20, "rounds": 40, "finished": False, "accuracy": 0.5, "lambda1": 2.5, "epsilon": 2.0}
    expected |= {"refused": {"raised": 4}, "skipped": 1, "bytes_down": 200, "sharpness_bytes": 4_000_000}
    assert found == {**found, **expected}
    assert found["curves"]["lambda1"] == [[5, 10.0], [10, 5.0], [15, pytest.approx(10 / 3)], [20, 2.5]]
