"""Claims: hypotheses that mean one thing, verdicts with the error rates of their interval, and nothing run twice."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedflat.cli import app
from fedflat.errors import RecipeError, RunError
from fedflat.report.svg_plots import forest
from fedflat.report.verdicts import seeds_text
from fedflat.rounds.cohort import cohort_seed, draw_cohort
from fedflat.runs.build import prepare
from fedflat.runs.claims import (
    Evidence,
    concluded,
    digest,
    further_seeds,
    judge,
    load_claim,
    load_studies,
    shipped_claims,
    shipped_evidence,
    state_of,
)
from fedflat.runs.claims.claim import FEWEST
from fedflat.runs.claims.effect import beside_best
from fedflat.runs.claims.evidence import row_of
from fedflat.runs.claims.kendall import pooled_tau
from fedflat.runs.claims.quantities import DERIVED, rounds_to_target
from fedflat.runs.claims.verdict import Hypothesis
from fedflat.runs.experiment import execute
from fedflat.runs.sweep import load_sweep
from fedflat.runs.sweep.results import finished, save_result

REPETITIONS = 200
STUDY = """
preset = "none"
data = "digits"
model = { name = "mlp", hidden = [8] }
split = { name = "dirichlet", clients = 4, alpha = 1.0 }
local = { batch = 50 }
server = { rounds = 2, cohort = 2 }

[grid]
method = ["fedavg", "fedprox(0.0)"]
rate = ["usual", "tiny"]
seed = [0, 1, 2]

[[override]]
when = { rate = "usual" }
set = { local.lr = 0.2 }

[[override]]
when = { rate = "tiny" }
set = { local.lr = 1e-6 }
"""
CLAIM = """
title = "Training helps"
paper = "Folklore"
here = "Digits"
study = "rates"

[[part]]
name = "accuracy"
quantity = "accuracy_last"
of = { method = "fedavg", rate = "usual" }
against = { method = "fedavg", rate = "tiny" }
direction = "higher"
"""


@pytest.fixture
def bench(tmp_path):
    """A directory with one study, and a function that writes a claim about it."""
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "rates.toml").write_text(STUDY)

    def written(text: str, name: str = "mine") -> Path:
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return path

    return tmp_path, written


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    """The results of the study, whose runs were made in this process as its jobs would."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rates.toml").write_text(STUDY)
    study, known = load_sweep(folder / "rates.toml"), Evidence()
    for point in study.points:
        execute(prepare(point.recipe), folder / point.slug)
        save_result(folder / point.slug, point, study.scale, [])
    known.gather(study, folder)
    return known


def changed(**fields: str) -> str:
    """The claim with other lines in its part."""
    lines = [line for line in CLAIM.splitlines() if line.partition(" =")[0] not in fields]
    return "\n".join([*lines, *(f"{name} = {value}" for name, value in fields.items())])


def judged(path, evidence):
    claim = load_claim(path)
    return state_of(claim, load_studies(claim, path.parent), evidence)


def test_a_better_an_equal_and_a_worse_method_on_a_real_federation(bench, evidence):
    _, written = bench
    assert judged(written(CLAIM), Evidence()).verdict == "not run yet"
    better = judged(written(CLAIM), evidence)
    assert better.verdict == "holds" and better.runs == better.known == 6 and better.effects[0].finding.seeds == 3
    worse = changed(of='{ method = "fedavg", rate = "tiny" }', against='{ method = "fedavg", rate = "usual" }')
    assert judged(written(worse), evidence).verdict == "does not hold"
    assert judged(written(changed(direction='"lower"')), evidence).verdict == "does not hold"
    equal = changed(of='{ method = "fedprox(0.0)", rate = "usual" }', against='{ method = "fedavg", rate = "usual" }')
    assert judged(written(equal), evidence).word == "undecided"
    # FedProx with μ = 0 is FedAvg to the bit: no number of seeds could tell them apart.
    assert "more than 1,000" in judged(written(equal), evidence).verdict
    nearly = judged(written(equal + "\nbound = -0.01"), evidence)
    assert nearly.verdict == "holds", "equal is no loss beyond a margin"


def test_a_method_that_is_equal_but_for_chance_is_undecided(bench, tmp_path):
    """After one round, cohorts that other authors draw are as good as ours: the split makes all clients alike."""
    folder, written = bench
    text = STUDY.replace("rounds = 2", "rounds = 1").replace('["fedavg", "fedprox(0.0)"]', '["fedavg"]')
    path = folder / "studies" / "rates.toml"
    path.write_text(text.replace("set = { local.lr = 1e-6 }", 'set = { local.lr = 0.2, server.draws = "fedsol" }'))
    study, known = load_sweep(path), Evidence()
    for point in study.points:
        execute(prepare(point.recipe), tmp_path / point.slug)
        save_result(tmp_path / point.slug, point, study.scale, [])
    known.gather(study, tmp_path)
    state = judged(written(CLAIM), known)
    assert len(set(state.effects[0].values)) == 3, "no two seeds agree"
    assert state.word == "undecided"


def test_pairing_removes_what_the_seeds_share_and_keeps_the_error_rates(bench):
    """200 claims about five seeds that differ a hundred times as much as the methods within a seed."""
    folder, written = bench
    text = STUDY.replace("seed = [0, 1, 2]", "seed = [0, 1, 2, 3, 4]").replace(
        '["fedavg", "fedprox(0.0)"]', '["fedavg"]'
    )
    (folder / "studies" / "rates.toml").write_text(text)
    claim = load_claim(written(CLAIM))
    studies = load_studies(claim, folder)
    points = [(digest(point), point) for point in studies["rates"].points]
    chance = np.random.default_rng(3)

    def word(shift):
        shared, own = chance.normal(0, 100, 5), iter(chance.normal(0, np.sqrt(0.5), 10))
        rows = {
            key: {"digest": key, "values": point.values, "curve": [], "metrics": {"accuracy_last": float(
                shared[point.recipe.seed] + next(own) + shift * (point.values["rate"] == "usual")
            )}}
            for key, point in points
        }  # fmt: skip
        return state_of(claim, studies, Evidence({"rates": rows})).word

    words = {shift: [word(shift) for _ in range(REPETITIONS)] for shift in (3.0, 0.0, -3.0)}
    assert words[3.0].count("does not hold") == 0 == words[-3.0].count("holds")
    assert min(words[3.0].count("holds"), words[-3.0].count("does not hold")) > 0.95 * REPETITIONS
    wrong = [words[0.0].count(each) for each in ("holds", "does not hold")]
    assert max(wrong) <= 12 and sum(wrong) >= 1


def test_the_error_rates_are_what_the_interval_promises():
    """Effects of one deviation over five seeds: planted well above the bound, at it, and well below."""
    chance = np.random.default_rng(3)
    words = {
        shift: [judge(chance.normal(shift, 1.0, 5), 0.0, "higher").word for _ in range(REPETITIONS)]
        for shift in (3.0, 0.0, -3.0)
    }
    assert words[3.0].count("does not hold") == 0 == words[-3.0].count("holds")
    assert min(words[3.0].count("holds"), words[-3.0].count("does not hold")) > 0.95 * REPETITIONS
    wrong = [words[0.0].count(word) for word in ("holds", "does not hold")]
    # 2.5 % on each side: 5 of 200 are expected, and more than 12 would be one case in a thousand.
    assert max(wrong) <= 12 and sum(wrong) >= 1


def test_an_interval_covers_the_true_effect_in_19_of_20_repetitions():
    chance = np.random.default_rng(5)
    found = [judge(chance.normal(0.3, 2.0, 4), 0.0, "higher") for _ in range(5 * REPETITIONS)]
    assert 0.93 < np.mean([each.low <= 0.3 <= each.high for each in found]) < 0.97


def test_seeds_added_after_a_look_keep_the_error_rate_only_without_the_seeds_that_were_looked_at():
    """No effect at all: five seeds, then one more at a time until it is decided, or eight new ones at once."""
    chance = np.random.default_rng(11)
    stretched, fresh = 0, 0
    for _ in range(REPETITIONS):
        effects = chance.normal(0, 1, 25)
        stretched += any(judge(effects[:n], 0.0, "higher").word != "undecided" for n in range(5, 26))
        fresh += judge(effects[5:13], 0.0, "higher").word != "undecided"
    # 5 % of 200 are 10; more than 20 would be one case in a thousand.
    assert fresh <= 20 < stretched


def test_the_pilots_seeds_do_not_count(bench, evidence):
    _, written = bench
    whole, later = judged(written(CLAIM), evidence), judged(written(f"pilot = [0]\n{CLAIM}", "later"), evidence)
    assert (later.runs, later.known, later.effects[0].finding.seeds) == (4, 4, 2)
    assert later.effects[0].values == whole.effects[0].values[1:] and later.hours < whole.hours
    part = CLAIM[CLAIM.index("[[part]]") :]
    ranked = '\n[ranking]\nquantity = "loss"\nmeasures = ["accuracy_last"]\nstudies = ["rates"]\n'
    (effect,) = judged(written(f"pilot = [2]\n{CLAIM.replace(part, ranked)}", "ranked"), evidence).effects
    assert effect.finding.seeds == 2
    path = written(f"pilot = [0, 1, 2]\n{CLAIM}", "none")
    with pytest.raises(RecipeError, match="no run of the study rates outside of the pilot"):
        load_studies(load_claim(path), path.parent)


def test_a_claim_of_many_parts_keeps_the_error_rate_of_one():
    """Eight parts exactly at the bound: without a correction one in six claims would be refuted."""
    chance = np.random.default_rng(7)
    claims = [[Hypothesis(chance.normal(0, 1, 5), 0.0, "higher") for _ in range(8)] for _ in range(REPETITIONS)]
    refuted = sum(concluded(parts)[0] == "does not hold" for parts in claims)
    naive = sum(any(part.judged().word == "does not hold" for part in parts) for parts in claims)
    assert refuted <= 12 and naive > 20
    supported = sum(concluded(parts, "any")[0] == "holds" for parts in claims)
    assert supported <= 12


def test_a_claim_holds_if_all_parts_do_and_any_needs_but_one():
    effects = [1.0, 1.1, 0.9, 1.0]
    yes, no = Hypothesis(effects, 0.0, "higher"), Hypothesis(effects, 0.0, "lower")
    maybe, none = Hypothesis([1.0, -1.0, 0.5], 0.0, "higher"), Hypothesis([], 0.0, "higher")
    assert [concluded(parts)[0] for parts in ([yes, yes], [yes, no], [yes, maybe], [maybe, no])] == [
        "holds", "does not hold", "undecided", "does not hold",
    ]  # fmt: skip
    assert concluded([yes, none])[0] == "not run yet" and concluded([no, none])[0] == "does not hold"
    assert concluded([yes, no], "any")[0] == "holds" and concluded([no, no], "any")[0] == "does not hold"


def test_the_promised_number_of_seeds_decides():
    """With effects that keep mean and deviation, one seed less leaves it open and the promised number does not."""
    base = [1.5, -0.5, 1.0, -0.2]
    more = judge(base, 0.0, "higher").more
    mean, deviation = np.mean(base), np.std(base, ddof=1)

    def continued(n):
        raw = np.resize([1.0, -1.0], n)
        raw = (raw - raw.mean()) / raw.std(ddof=1)
        return mean + deviation * raw

    assert judge(continued(4 + more), 0.0, "higher").word == "holds"
    assert judge(continued(4 + more - 1), 0.0, "higher").word == "undecided"
    assert further_seeds(4, 0.0, 1.0) is None and judge([1.0], 0.0, "higher").more == 1


def test_rounds_to_target_count_a_run_that_never_gets_there_as_one_more(bench, evidence):
    _, written = bench
    path = written(changed(quantity='"rounds_to_target"', target="0.999", direction='"lower"'))
    (effect,) = judged(path, evidence).effects
    assert effect.means == (3.0, 3.0) and set(effect.values) == {0.0}


def test_a_target_of_a_metric_of_which_less_is_better_is_reached_from_above(bench):
    folder, written = bench
    path = written(changed(quantity='"rounds_to_target"', target="0.6", direction='"lower"'))
    rows = results(folder, lambda i: {})
    for number, row in enumerate(rows.values()):
        row["curve"] = [[1, 0.9], [2, 0.5 if number % 6 < 3 else 0.7]]
    assert judged(path, Evidence({"rates": rows})).effects[0].means == (1.0, 1.0), "more is better: at once"
    for row in rows.values():
        row["best"] = "lowest"
    assert judged(path, Evidence({"rates": rows})).effects[0].means == (2.0, 3.0)


def test_the_row_of_a_run_says_that_less_is_better(bench, tmp_path):
    folder, _ = bench
    point = replace(load_sweep(folder / "studies" / "rates.toml").points[0], after=())
    less = point.recipe.model_copy(
        update={"evaluation": point.recipe.evaluation.model_copy(update={"metric": "loss", "best": "lowest"})}
    )
    for name, recipe in (("more", point.recipe), ("less", less)):
        execute(prepare(point.recipe), tmp_path / name)
        (tmp_path / name / "recipe.toml").write_text(recipe.to_toml())
        save_result(tmp_path / name, point, "full", [])
    assert "best" not in row_of(tmp_path / "more", point)
    assert row_of(tmp_path / "less", point)["best"] == "lowest"


def test_a_run_that_was_never_evaluated_has_no_round_and_is_left_out(bench):
    folder, written = bench
    assert rounds_to_target([], 0.5, 4) is None
    rows = results(folder, lambda i: {})
    for row in [*rows.values()][1:]:
        row["curve"] = [[1, 0.9]]
    path = written(changed(quantity='"rounds_to_target"', target="0.6", direction='"lower"'))
    (effect,) = judged(path, Evidence({"rates": rows})).effects
    assert (effect.finding.seeds, effect.left_out) == (2, 1)


def test_derived_quantities_are_what_their_names_say():
    duality = {"gap": 0.4, "train_to_test_gap": 0.125, "train_to_test_fluctuation": 0.1, "train_to_test_drift": -0.025,
               "test_to_train_fluctuation": 0.5}  # fmt: skip
    metrics = {f"duality_fc2_{name}": value for name, value in duality.items()}
    metrics |= {"loss": 0.75, "train_loss": 0.5, "local_accuracy": 0.5, "local_accuracy_before": 0.625}
    found = {name: of(metrics) for name, of in DERIVED.items()}
    expected = {"gap": 0.25, "drift_share": 0.2, "explained": 0.25, "explained_test_to_train": 1.25}
    assert found == pytest.approx({**expected, "knowledge_kept": -0.125})
    assert [of({}) for of in DERIVED.values()] == [None] * len(DERIVED)
    for name in metrics:
        without = {**metrics}
        del without[name]
        assert None in {name: of(without) for name, of in DERIVED.items()}.values(), name
    still = {**metrics, "duality_fc2_gap": 0.0, "duality_fc2_train_to_test_gap": 0.0}
    assert {name for name, of in DERIVED.items() if of(still) is None} == {*expected} - {"gap"}


def test_the_effect_of_a_ratio_is_the_geometric_mean_of_the_seeds_ratios(bench):
    folder, written = bench
    # The runs of `usual` are 0, 1 and 2, those of `tiny` 3, 4 and 5: ratios 2, 4 and 8.
    losses = [2.0, 12.0, 40.0, 1.0, 3.0, 5.0]
    known = Evidence({"rates": results(folder, lambda i: {"loss": losses[i % 6]})})
    (effect,) = judged(written(changed(quantity='"loss"', compare='"ratio"')), known).effects
    reach = stats.t.ppf(0.975, 2) * np.log(2) / np.sqrt(3)
    found = effect.finding
    assert (found.mean, found.low, found.high) == pytest.approx((4.0, 4 * np.exp(-reach), 4 * np.exp(reach)))
    assert effect.means == pytest.approx((18.0, 3.0)) and effect.seeds == (0, 1, 2)
    (difference,) = judged(written(changed(quantity='"loss"')), known).effects
    assert difference.finding.mean == pytest.approx(15.0) and difference.values == pytest.approx((1.0, 9.0, 35.0))


def test_results_are_kept_as_lines_and_found_again_by_their_digest(bench, evidence):
    folder, _ = bench
    study = load_sweep(folder / "studies" / "rates.toml")
    evidence.write(study, folder / "kept")
    again = Evidence.read([folder / "kept"])
    assert again.rows == json.loads(json.dumps(evidence.rows))
    assert not again.missing(study, study.points)
    other = load_sweep(folder / "studies" / "rates.toml", overrides=["local.momentum=0.5"])
    assert len(again.missing(other, other.points)) == len(other.points), "other settings are other runs"
    longer = load_sweep(folder / "studies" / "rates.toml", overrides=["server.rounds=3"])
    assert digest(longer.points[0]) != digest(study.points[0])
    elsewhere = load_sweep(folder / "studies" / "rates.toml", overrides=["engine.workers=2", "data.dir=/tmp"])
    assert digest(elsewhere.points[0]) == digest(study.points[0]), "where it runs does not matter"
    point, recipe = study.points[0], study.points[0].recipe
    based = [replace(point, base=each) for each in (None, recipe, recipe.model_copy(update={"seed": 7}))]
    assert len({*map(digest, based)}) == 3, "the base that it starts from does"
    before = (folder / "kept" / "rates.jsonl").read_bytes()
    again.write(study, folder / "kept")
    assert (folder / "kept" / "rates.jsonl").read_bytes() == before


def test_a_damaged_line_is_named(bench):
    folder, _ = bench
    kept = folder / "kept"
    kept.mkdir()
    (kept / "rates.jsonl").write_text('{"digest": "0", "values": {}, "metrics": {"a": "x"}, "curve": []}\n')
    with pytest.raises(RunError, match=r"rates\.jsonl: line 1 is not a valid result"):
        Evidence.read([kept])
    (kept / "rates.jsonl").write_text('{"other": "form"}\n{"')
    with pytest.raises(RunError, match="line 2 is not JSON"):
        Evidence.read([kept])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"direction": '"sideways"'}, "direction"),
        ({"quantity": '"rounds_to_target"'}, "needs one"),
        ({"compare": '"ratio"', "bound": "-1.0"}, "above 0"),
        ({"of": '{ method = "fedsam" }'}, "no run of the study rates"),
        ({"of": '{ method = "fedavg" }'}, "several runs of one seed"),
        ({"study": '"../rates"'}, "there is no study"),
        ({"study": f'"{"x" * 5000}"'}, "there is no study"),
        ({"bound": "nan"}, "finite"),
        ({"bound": "-inf"}, "finite"),
        ({"quantity": '"rounds_to_target"', "target": "inf"}, "finite"),
        ({"against": '{ method = "fedavg", rate = "usual" }'}, "are the same runs"),
        ({"colour": "1"}, "colour"),
        (
            {
                "of": '{ method = "fedavg", rate = "usual", seed = 0 }',
                "against": '{ rate = "tiny", method = "fedavg", seed = 1 }',
            },
            "no seed in common",
        ),
        ({"against": '{ method = "fedavg", rate = "usual", seed = 0 }'}, "share runs"),
    ],
)
def test_a_claim_that_means_nothing_is_refused(bench, fields, sentence):
    _, written = bench
    path = written(changed(**fields))
    with pytest.raises(RecipeError, match=sentence):
        load_studies(load_claim(path), path.parent)


def test_the_command_trains_what_is_missing_and_nothing_twice(bench, capsys, monkeypatch):
    folder, written = bench
    monkeypatch.chdir(folder)
    few = STUDY.replace("seed = [0, 1, 2]", "seed = [0]").replace('["fedavg", "fedprox(0.0)"]', '["fedavg"]')
    (folder / "studies" / "rates.toml").write_text(few)
    path = written(CLAIM)
    app(["claims", str(path), "--list", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[0]["known"] == 0
    app(["claims", str(path), "--jobs", "2", "--json"], standalone_mode=False)
    (state,) = json.loads(capsys.readouterr().out)
    assert state["known"] == 2 and state["verdict"] == "undecided (would need 1 more seed)"
    monkeypatch.setattr("fedflat.runs.sweep.Jobs.run", lambda *_: pytest.fail("it trained again"))
    for each in (folder / "sweeps" / "rates").iterdir():
        each.rename(folder / f"moved-{each.name}")  # the lines are enough
    app(["claims", str(path), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == [state]
    app(["claims", str(path)], standalone_mode=False)
    assert "accuracy" in capsys.readouterr().out


def test_seeds_that_rank_alike_are_not_certain():
    """Three seeds of three methods all in the claimed order: by chance alone one in 216."""
    alike = Hypothesis([1.0, 1.0, 1.0], 0.9, "higher", step=2 / 3)
    assert alike.judged().word == "undecided" and alike.judged().low < 0
    assert Hypothesis([1.0, 1.0, 1.0], 0.9, "higher").judged().word == "holds"
    assert concluded([alike])[0] == "undecided"


def test_a_measure_that_ranks_by_construction_has_tau_one_and_noise_has_none():
    chance = np.random.default_rng(0)
    clusters = [[(x, 2 * x + 5 * cluster) for x in chance.normal(size=6)] for cluster in range(8)]
    within = [[(x, y - 5 * cluster) for x, y in each] for cluster, each in enumerate(clusters)]
    assert pooled_tau([within]) == (1.0, 1.0, 1.0)
    tau, low, high = pooled_tau([[[(x, chance.normal()) for x, _ in each] for each in clusters]])
    assert low < 0 < high and low <= tau <= high


def seeds_of(chance, m, case, methods=10):
    """Runs of m seeds, in which a measure and a quantity agree to some degree."""
    for number in range(m):
        x, noise, (a, b) = chance.normal(size=methods), chance.normal(size=methods), chance.normal(size=2)
        if case == "settings that differ":  # two studies, far apart in both values
            x, noise = x + 3 * (2 * number > m) + 0.3 * a, noise + 2 * (2 * number > m) + 0.3 * b
        slope = {"unrelated": 0.0, "seeds that differ": 0.5 + 0.7 * a, "nearly the same order": 2.0}.get(case, 0.4)
        yield list(zip(x, slope * x + noise, strict=True))


@pytest.mark.parametrize("m", [5, 10])
@pytest.mark.parametrize("case", ["unrelated", "seeds that differ", "nearly the same order", "settings that differ"])
def test_the_interval_of_tau_over_all_runs_covers_its_expectation_in_95_of_100_repetitions(case, m):
    chance = np.random.default_rng(11)
    found = []
    for _ in range(400):
        seeds, first = [*seeds_of(chance, m, case)], m // 2 + 1
        found.append(pooled_tau([seeds[:first], seeds[first:]] if case == "settings that differ" else [seeds]))
    expected = np.mean([tau for tau, _, _ in found])
    assert 0.93 <= np.mean([low <= expected <= high for _, low, high in found]) <= 0.97


def test_the_ends_of_tau_are_students_for_the_jackknife_on_the_scale_of_artanh():
    seeds = [*seeds_of(np.random.default_rng(1), 6, "unrelated")]

    def z(some):
        x, y = np.concatenate(some).T
        return np.arctanh(stats.kendalltau(x, y).statistic)

    left_out = [z(seeds[:i] + seeds[i + 1 :]) for i in range(6)]
    two, four = (25 / 36 * m**2 / (m - 1) * np.var(some) for m, some in ((2, left_out[:2]), (4, left_out[2:])))
    welch = (two + four) ** 2 / (two**2 + four**2 / 3)
    for studies, freedom, variance in (
        ([seeds], 5, 5 * np.var(left_out)),
        ([seeds[:2], seeds[2:]], welch, two + four),
    ):
        reach = stats.t.ppf(0.975, freedom) * np.sqrt(variance)
        assert pooled_tau(studies) == pytest.approx(np.tanh([z(seeds), z(seeds) - reach, z(seeds) + reach]))
    assert all(map(np.isnan, pooled_tau([seeds[:1], seeds[1:]])[1:])), "one seed of a study has no spread"


@pytest.mark.parametrize("name", shipped_claims())
def test_every_claim_that_comes_along_can_be_tested(name):
    claim = load_claim(name)
    studies = load_studies(claim)
    assert all(claim.points(study) for study in studies.values())
    state = state_of(claim, studies, Evidence.read([shipped_evidence()]))
    assert state.verdict and len(state.effects) >= len(claim.part)


def test_committed_results_belong_to_the_studies_as_they_are():
    """A study whose settings were changed has no results; its old lines would only mislead."""
    evidence = Evidence.read([shipped_evidence()])
    for path in sorted((shipped_claims()["man-cost"].parent / "studies").glob("*.toml")):
        study = load_sweep(path)
        known = {digest(point) for point in study.points}
        assert evidence.rows.get(study.name, {}).keys() <= known, study.name


def test_grid_order_decides_the_order_of_lines_not_the_order_of_runs(bench):
    folder, _ = bench
    study = load_sweep(folder / "studies" / "rates.toml")
    rows = {digest(p): {"digest": digest(p), "values": p.values, "metrics": {}, "curve": []} for p in study.points}
    Evidence({"rates": dict(reversed(rows.items()))}).write(study, folder / "a")
    Evidence({"rates": rows}).write(replace(study), folder / "b")
    assert (folder / "a" / "rates.jsonl").read_bytes() == (folder / "b" / "rates.jsonl").read_bytes()


@pytest.mark.parametrize(
    "damage",
    [{"metrics": None}, {"metrics": [1]}, {"metrics": {"loss": "low"}}, {"scale": None}, {"asked": None}, None],
    ids=lambda damage: str(damage),
)
def test_a_run_with_a_damaged_result_is_not_finished(bench, damage):
    folder, _ = bench
    study = load_sweep(folder / "studies" / "rates.toml")
    point = study.points[0]
    whole = {"scale": "full", "metrics": {"loss": 1.5, "target": None}, "asked": point.asked()}
    result = folder / point.slug / "result.json"
    result.parent.mkdir()
    result.write_text(json.dumps(whole))
    assert finished(result.parent, point)
    kept = {name: value for name, value in {**whole, **(damage or {})}.items() if value is not None}
    result.write_text(json.dumps(kept) if damage else "[" * 10**5)
    known = Evidence()
    known.gather(study, folder)
    assert not finished(result.parent, point) and not known.rows


def test_a_run_whose_metrics_lack_rounds_gives_no_curve(bench, evidence, tmp_path):
    folder, _ = bench
    point = load_sweep(folder / "studies" / "rates.toml").points[0]
    execute(prepare(point.recipe), tmp_path / "run")
    save_result(tmp_path / "run", point, "full", [])
    (row,) = (each for each in evidence.rows["rates"].values() if each["digest"] == digest(point))
    assert row_of(tmp_path / "run", point)["curve"] == row["curve"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    del summary["versions"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    assert row_of(tmp_path / "run", point)["versions"] == {}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    for damaged in (lines[1:], lines[:1], ["{\n", *lines[1:]], [*lines, lines[1]]):
        (tmp_path / "run" / "metrics.jsonl").write_text("".join(damaged))
        with pytest.raises(RunError, match=r"metrics\.jsonl: lacks rounds of the run; delete its directory"):
            row_of(tmp_path / "run", point)


def test_a_run_of_an_earlier_version_counts_if_the_new_fields_have_their_defaults(bench):
    folder, _ = bench
    point = load_sweep(folder / "studies" / "rates.toml").points[0]
    asked = point.asked()
    del asked["evaluation"]["validation"]
    (folder / "result.json").write_text(json.dumps({"scale": "full", "metrics": {}, "asked": asked}))
    assert finished(folder, point)
    asked["local"]["lr"] = 0.3
    (folder / "result.json").write_text(json.dumps({"scale": "full", "metrics": {}, "asked": asked}))
    assert not finished(folder, point)


RANKED = """
title = "Flat is good"
paper = "Folklore"
here = "Digits"

[ranking]
quantity = "loss"
measures = ["lambda1", "trace"]
studies = ["rates"]
"""


def results(folder, metrics, name="rates"):
    """Evidence of the study with these metrics: a function of the number of the run, in the order of the grid."""
    study = load_sweep(folder / "studies" / f"{name}.toml")
    rows = [
        {"digest": digest(p), "values": p.values, "metrics": metrics(i), "curve": []}
        for i, p in enumerate(study.points)
    ]
    return {row["digest"]: row for row in rows}


def test_a_seed_of_two_studies_counts_once(bench):
    """The same runs under two names are no further evidence: the number of seeds and all intervals stay."""
    folder, written = bench
    (folder / "studies" / "again.toml").write_text(STUDY)
    chance = np.random.default_rng(2)
    values = [
        dict(zip(("loss", "lambda1", "trace"), map(float, chance.normal(size=3)), strict=True)) for _ in range(12)
    ]
    known = Evidence({name: results(folder, values.__getitem__, name) for name in ("rates", "again")})
    once = judged(written(RANKED, "once"), known)
    twice = judged(written(RANKED.replace('["rates"]', '["rates", "again"]'), "twice"), known)
    assert once.effects == twice.effects and once.effects[0].finding.seeds == 3


def test_runs_that_lack_the_quantity_are_counted(bench):
    """A ratio has no logarithm of a trace that is not positive, and a loss may be infinite; a table says so."""
    folder, written = bench
    path = written(changed(quantity='"trace"', compare='"ratio"'))
    for bad in (-1.0, 0.0, np.inf, np.nan, None):
        # The runs of `usual` are 0, 1 and 2, those of `tiny` 3, 4 and 5.
        known = Evidence({"rates": results(folder, lambda i, bad=bad: {"trace": bad if i == 4 else 1.0 + i})})
        for row in known.rows["rates"].values():
            row["metrics"] = {name: value for name, value in row["metrics"].items() if value is not None}
        (effect,) = judged(path, known).effects
        assert (effect.finding.seeds, effect.left_out) == (2, 1) and seeds_text(effect) == "2 (1 left out)"
    whole = Evidence({"rates": results(folder, lambda i: {"trace": 1.0 + i})})
    assert judged(path, whole).effects[0].left_out == 0


def test_a_ratio_beyond_all_floats_has_a_verdict_and_a_picture(bench):
    folder, written = bench
    extremes = [1e-300, 1e300, 1.0, 1e300, 1e-300, 2.0]
    known = Evidence({"rates": results(folder, lambda i: {"loss": extremes[i % 6], "seconds": np.nan})})
    state = judged(written(changed(quantity='"loss"', compare='"ratio"')), known)
    assert state.word == "undecided" and state.hours == 0 and state.effects[0].finding.high == np.inf
    assert "nan" not in forest(state.effects, "t")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"metrics": {"loss": 10**400}}, "not a valid result"),
        ({"metrics": {"loss": True}}, "not a valid result"),
        ({"curve": [[1, float("nan")]]}, "not a valid result"),
        ({"curve": [[0.5, 1.0]]}, "not a valid result"),
        ({"curve": [[-1, 1.0]]}, "not a valid result"),
        ({"curve": [[2, 0.5], [1, 0.6]]}, "not a valid result"),
        ({"digest": ["0"]}, "not a valid result"),
        ({"metrics": {"loss": 2.0}}, "line 2 has other results than an earlier line of the same run"),
    ],
)
def test_a_line_that_cannot_be_is_named(bench, fields, sentence):
    folder, _ = bench
    kept = folder / "kept"
    kept.mkdir()
    good = {"digest": "0", "values": {}, "metrics": {"loss": float("nan")}, "curve": [[1, 0.5]]}
    (kept / "rates.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(good)}\n")
    assert len(Evidence.read([kept]).rows["rates"]) == 1, "the same line twice is harmless"
    (kept / "rates.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps({**good, **fields})}\n")
    with pytest.raises(RunError, match=sentence):
        Evidence.read([kept])


def test_lines_that_another_process_has_added_stay(bench):
    folder, _ = bench
    study, rows = load_sweep(folder / "studies" / "rates.toml"), results(folder, lambda i: {"loss": float(i)})
    first, *others = rows
    Evidence({"rates": {first: rows[first]}}).write(study, folder / "kept")
    Evidence({"rates": {each: rows[each] for each in others}}).write(study, folder / "kept")
    assert Evidence.read([folder / "kept"]).rows["rates"] == rows


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('["lambda1", "trace"]', '["lambda1", "loss"]', "'loss' is named twice"),
        ('["rates"]', '["rates", "rates"]', "'rates' is named twice"),
        ('["lambda1", "trace"]', '["lambda1"]\nbeside = ["lambda1"]', "'lambda1' is named twice"),
        ('["lambda1", "trace"]', '["rounds_to_target"]', "needs a target"),
        ("\n[ranking]", "pilot = [0, 1, 2]\n[ranking]", "no run of the study rates is outside of the pilot"),
        ('["rates"]', '["pairs"]', "no seed of the study pairs has 3 runs, which a ranking needs"),
    ],
)
def test_a_ranking_that_means_nothing_is_refused(bench, before, after, sentence):
    folder, written = bench
    (folder / "studies" / "pairs.toml").write_text(STUDY.replace('["fedavg", "fedprox(0.0)"]', '["fedavg"]'))
    path = written(RANKED.replace(before, after))
    with pytest.raises(RecipeError, match=sentence):
        load_studies(load_claim(path), path.parent)


def test_a_quantity_that_no_run_has_is_a_sentence_after_the_table(bench, capsys):
    folder, written = bench
    (folder / "kept").mkdir()
    rows = results(folder, lambda i: {"accuracy_last": 0.5, "loss": 1.0 + i}).values()
    (folder / "kept" / "rates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for fields in ({"quantity": '"acuracy_last"'}, {"against_quantity": '"acuracy_last"'}):
        command = ["claims", str(written(changed(**fields))), "--dry", "--results", str(folder / "kept")]
        with pytest.raises(RecipeError, match=r"no run has the quantity acuracy_last; did you mean accuracy_last\?"):
            app(command, standalone_mode=False)
        assert "3 left out" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["lamda1", "trase"])
def test_a_measure_that_no_run_has_is_a_sentence_after_the_table(bench, capsys, wrong):
    """Among the measures, beside them, or as the quantity that they should rank."""
    folder, written = bench
    (folder / "kept").mkdir()
    rows = results(folder, lambda i: {"loss": 1.0 + i, "lambda1": 2.0 * i, "trace": 1.0 * i}).values()
    (folder / "kept" / "rates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = {"lamda1": "lambda1", "trase": "trace"}[wrong]
    for text in (
        RANKED.replace(right, wrong),
        RANKED.replace('"lambda1", "trace"', '"loss"').replace('quantity = "loss"', f'quantity = "{wrong}"'),
        RANKED.replace('["lambda1", "trace"]', f'["{right}"]\nbeside = ["{wrong}"]'),
    ):
        command = ["claims", str(written(text)), "--dry", "--results", str(folder / "kept")]
        with pytest.raises(RecipeError, match=rf"no run has the quantity {wrong}; did you mean {right}\?"):
            app(command, standalone_mode=False)
        assert "3 left out, 12 runs lack it" in " ".join(capsys.readouterr().out.split())


def test_a_ranking_counts_the_seeds_and_the_runs_that_lack_a_measure(bench):
    folder, written = bench

    def metrics(i):
        # The runs of seed 0 are 0, 3, 6 and 9. Two of them lack λ₁, one of seed 1 has none that is finite.
        odd = {0: {}, 3: {}, 4: {"lambda1": np.nan}}.get(i, {"lambda1": float(i)})
        return {"loss": 1.0 + i, "trace": 5.0 if i % 3 == 2 else float(i), **odd}

    state = judged(written(RANKED), Evidence({"rates": results(folder, metrics)}))
    curvature, trace = state.effects
    assert (curvature.finding.seeds, curvature.left_out, curvature.lacking) == (2, 1, 3) and curvature.seeds == (1, 2)
    assert seeds_text(curvature) == "2 (1 left out, 3 runs lack it)"
    assert (trace.finding.seeds, trace.left_out, trace.lacking) == (2, 1, 0), "a constant measure ranks nothing"
    few = Evidence({"rates": dict([*results(folder, metrics).items()][: 3 * (FEWEST - 1)])})
    assert [effect.left_out for effect in judged(written(RANKED), few).effects] == [0, 0], "runs that are not there"


def test_the_best_measure_is_compared_with_the_others_within_each_seed(bench):
    """Four runs a seed: λ₁ ranks them as the loss does, the trace but for one pair, the control the other way round."""
    folder, written = bench
    path = written(RANKED.replace("studies", 'beside = ["consistency"]\nstudies'))

    def metrics(i):
        place = i // 3  # 0 to 3 within a seed
        trace = [0.0, 1.0, 3.0, 2.0] if i % 3 else [0.0, 2.0, 3.0, 1.0]
        return {"loss": float(place), "lambda1": float(place), "trace": trace[place], "consistency": -float(place)}

    state = judged(path, Evidence({"rates": results(folder, metrics)}))
    best, trace, control = beside_best(state)
    assert best.name == "lambda1" and best == state.effects[0]
    # Kendall's τ of four runs with one or two discordant pairs of six: 2/3 and 1/3.
    assert trace.values == pytest.approx((2 / 3, 1 / 3, 1 / 3)) and not trace.control
    assert (control.name, control.values, control.control) == ("minus consistency", (0.0, 0.0, 0.0), True)
    error = np.hypot(np.std(trace.values, ddof=1), 1 / 6) / np.sqrt(3)
    assert trace.finding.high > 4 / 9 + 4 * error, "the interval is that of values with steps of a third"
    assert [effect.name for effect in state.judged] == ["lambda1", "trace"]
    assert beside_best(judged(path, Evidence())) == []


def test_a_controls_rank_decides_nothing(bench):
    folder, written = bench
    text = RANKED.replace('["lambda1", "trace"]', '["trace"]\nbeside = ["lambda1"]')
    known = Evidence({"rates": results(folder, lambda i: {"loss": i // 3, "lambda1": i // 3, "trace": -(i // 3)})})
    state = judged(written(text), known)
    assert [effect.label for effect in state.effects] == ["trace", "lambda1 (control)"]
    assert [effect.finding.word for effect in state.effects] == ["does not hold", "holds"]
    assert state.word == "does not hold"


def test_first_weights_without_their_digest_are_refused(bench):
    """Results are found again by their settings, and two files can be at one path."""
    folder, written = bench
    path, study = written(CLAIM), folder / "studies" / "rates.toml"
    base = 'model = { name = "mlp", hidden = [8], base = "weights.safetensors"'
    study.write_text(STUDY.replace('model = { name = "mlp", hidden = [8]', base))
    with pytest.raises(RecipeError, match=r"study rates has a model\.base without model\.base_sha256"):
        load_studies(load_claim(path), path.parent)
    digests = set()
    for known in ("0" * 64, "1" * 64):
        study.write_text(STUDY.replace('model = { name = "mlp", hidden = [8]', f'{base}, base_sha256 = "{known}"'))
        (found,) = load_studies(load_claim(path), path.parent).values()
        digests.add(digest(found.points[0]))
    assert len(digests) == 2


def test_seeds_that_are_added_to_known_ones_are_named_before_they_are_trained(bench, capsys, monkeypatch):
    folder, written = bench
    monkeypatch.chdir(folder)
    monkeypatch.setattr("fedflat.cli.claims.train_all", lambda *_: {})
    (folder / "kept").mkdir()
    rows = [row for row in results(folder, lambda i: {"accuracy_last": 0.5 + i}).values() if row["values"]["seed"] < 2]
    (folder / "kept" / "rates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def said(text):
        app(["claims", str(written(text)), "--results", str(folder / "kept")], standalone_mode=False)
        return " ".join(capsys.readouterr().err.split())

    assert "has results for seeds 0, 1, and 2 are new; if you looked at the verdict" in said(CLAIM)
    assert "are new" not in said(f"pilot = [0, 1]\n{CLAIM}")
    rest = [row for row in rows if row["values"]["rate"] == "usual"]
    (folder / "kept" / "rates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rest))
    assert "are new" not in said(CLAIM), "no pair of runs is there yet, so there was nothing to look at"


def test_two_studies_of_one_name_are_refused(bench):
    folder, written = bench
    (folder / "other" / "studies").mkdir(parents=True)
    (folder / "other" / "studies" / "rates.toml").write_text(STUDY.replace("rounds = 2", "rounds = 3"))
    (folder / "other" / "another.toml").write_text(CLAIM)
    (folder / "other" / "mine.toml").write_text(CLAIM)
    mine = str(written(CLAIM))
    app(["claims", mine, mine, "--list"], standalone_mode=False)
    for name in ("another", "mine"):
        with pytest.raises(RecipeError, match=r"the (study rates|claim mine) has the name of another one"):
            app(["claims", mine, str(folder / "other" / f"{name}.toml"), "--list"], standalone_mode=False)


@pytest.mark.parametrize("name", shipped_claims())
def test_a_claim_whose_seeds_share_their_cohorts_says_so(name):
    """The draws of some authors do not depend on the seed: the interval is about less than it seems."""
    claim = load_claim(name)
    for study in load_studies(claim).values():
        points = {point.recipe.seed: point.recipe for point in claim.points(study)}
        alone = study.name in ("step-cost", "duality-mnist", "duality-cifar10")  # one client, or one round
        drawn = {
            str([draw_cohort(r.server, r.split.clients, cohort_seed(r, s), t) for t in range(9)])
            for s, r in points.items()
        }
        if len(drawn) < len(points) and not alone:
            told = re.compile(r"all seeds have the same (split and )?cohorts: they differ in")
            assert any(told.search(note) for note in claim.notes), study.name
