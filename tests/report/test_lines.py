"""Runs as a report compares them: which of them make one line, how it is called, and what is read of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import record, run_of, written

from fedflat.errors import RunError
from fedflat.report.lines import Line, read_lines, read_run, thinned


@st.composite
def histories(draw):
    """The curves of some seeds, each cut short somewhere or with gaps."""
    values = st.none() | st.floats(-100, 100)
    return draw(st.lists(st.lists(values, min_size=1, max_size=8), min_size=1, max_size=4))


@given(histories())
def test_a_band_is_mean_and_range_over_the_rounds_that_all_seeds_have(curves):
    runs = [run_of([record(n, loss=v) for n, v in enumerate(curve, 1)]) for curve in curves]
    band = Line("line", tuple(runs)).band("loss")
    there = [{n: v for n, v in enumerate(curve, 1) if v is not None} for curve in curves]
    there = [curve for curve in there if curve]
    rounds = sorted(set.intersection(*map(set, there))) if there else []
    assert (band.rounds if band else []) == rounds
    for n, *found in zip(band.rounds, band.mean, band.low, band.high, strict=True) if band else ():
        column = [curve[n] for curve in there]
        assert found == pytest.approx([sum(column) / len(column), min(column), max(column)])


@given(st.integers(1, 5000), st.integers(2, 300))
def test_a_thinned_curve_keeps_its_ends_and_its_order(count, most):
    kept = thinned(count, most)
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert kept == sorted(set(kept))
    assert len(kept) == min(count, most)


def test_runs_that_differ_only_in_the_seed_are_one_line_named_by_the_method(tmp_path):
    for seed in (1, 0):
        written(tmp_path / f"a{seed}", [], "method=fedsam(rho=0.05)", f"seed={seed}", f"split.seed={seed}")
    written(tmp_path / "b", [], "method=fedavg")
    seeds = {line.name: [run.recipe.seed for run in line.runs] for line in read_lines([tmp_path])}
    assert seeds == {"fedsam": [0, 1], "fedavg": [0]}


def test_a_name_tells_lines_apart_by_options_settings_and_at_last_by_the_directory(tmp_path):
    for rho in (0.1, 0.2):
        written(tmp_path / f"rho{rho}", [], f"method=fedsam(rho={rho})")
    assert [line.name for line in read_lines([tmp_path])] == ["fedsam(rho=0.1)", "fedsam(rho=0.2)"]
    for lr in (0.1, 0.2):
        written(tmp_path / "lr" / f"{lr}", [], f"local.lr={lr}")
    assert [line.name for line in read_lines([tmp_path / "lr"])] == ["fedavg, local.lr=0.1", "fedavg, local.lr=0.2"]
    many = ["local.lr=0.3", "local.epochs=9", "local.batch=3", "server.rounds=99"]
    for place, more in enumerate(([], many, [*many, "server.lr=0.5"])):
        written(tmp_path / "many" / f"{place}", [], *more)
    names = [line.name for line in read_lines([tmp_path / "many"])]
    assert len(set(names)) == 3
    assert names[2].endswith(f"({tmp_path / 'many' / '2'})")


def test_a_run_given_twice_counts_once(tmp_path):
    run = written(tmp_path / "run", [])
    (line,) = read_lines([run, tmp_path, tmp_path / "run" / ".." / "run"])
    assert [each.path for each in line.runs] == [run]


def test_an_export_inside_a_run_is_no_run_of_its_own(tmp_path):
    run = written(tmp_path / "runs" / "0001", [])
    written(run / "export", [])
    assert [each.path for line in read_lines([tmp_path / "runs"]) for each in line.runs] == [run]


def test_a_line_that_is_still_being_written_does_not_count_and_a_damaged_one_is_named(tmp_path):
    path = written(tmp_path / "run", [record(1), record(2)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "byt')
    assert [each["round"] for each in read_run(path).history] == [1, 2]
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 3 is not a valid record"):
        read_run(path)
