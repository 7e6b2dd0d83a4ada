"""The report's page without a browser: what is on it, what is left out, and that nothing of a run becomes markup."""

import base64
import hashlib
import json
import re
import shlex
import shutil
import signal
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedflat import federate, train
from fedflat.cli import main
from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Landscape
from fedflat.prepare import gather, prepare
from fedflat.recipe import load
from fedflat.report import figures
from fedflat.report.lines import Band, Line, Run, read_lines, read_run, thinned
from fedflat.report.page import LIMIT, collect, page
from fedflat.report.sections import Content
from fedflat.run import execute

TINY = ["split.clients=5", "split.alpha=0.5", "model.hidden=[8]", "server.rounds=4", "engine=inline"]
RICH = ['evaluation.measures=["consistency","divergence","discord","local","classes"]', "evaluation.sharpness=4",
        "evaluation.target=0.3", "admission.max_ratio=1.01"]  # fmt: skip
EVERYWHERE = {"runs", "results", "learning", "split", "repeat"}
RECORDED = {"classes", "local", "rounds", "refused"}
MEASURED = {"flatness", "landscapes", "duality"}


class Read(HTMLParser):
    """A page as a browser takes it apart: elements with their attributes, all text, that of scripts and folds."""

    def __init__(self, content):
        super().__init__()
        self.elements, self.scripts, self.folds, self.text, self._inside = [], [], [], "", ""
        self.feed(content.decode())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.scripts += [""] if tag == "script" else []
        self.folds += [""] if tag == "pre" else []
        self._inside = tag

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.text += data
            if self._inside == "pre":
                self.folds[-1] += data

    def handle_endtag(self, tag):
        self._inside = ""

    @property
    def sections(self):
        return {found["id"] for tag, found in self.elements if tag == "section"}

    @property
    def figures(self):
        return json.loads(self.scripts[0])


def quiet(_):
    return nullcontext()


def made(*paths, **options):
    return page(collect(paths, quiet, **options))


def record(round, **values):
    return {"round": round, "bytes_down": 3_000_000, "bytes_up": 1_000_000, "seconds": 0.5, **values}


def run_of(records, *settings, path="runs/1"):
    return Run(Path(path), load(None, settings), records)


def written(path, records, *settings):
    """The directory of a run, as far as a report reads it."""
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(load(None, settings).to_toml())
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return path


def bowl(height, span=1.0):
    axis = np.linspace(-span, span, 5)
    values = 0.5 + height * (axis[:, None] ** 2 + 2 * axis[None, :] ** 2)
    return Landscape(np.stack([axis, axis]), values, 0.5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two methods by two seeds, with all that a recipe can have recorded."""
    base = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedsam(0.05)"):
        for seed in (0, 1):
            problem, recipe = prepare(load(None, [*TINY, *RICH, f"seed={seed}", f"method={method}"]))
            execute(problem, recipe, base / f"{method[:6]}-{seed}")
    return base


@pytest.fixture(scope="module")
def full(finished, tmp_path_factory):
    """Their page with all that can be measured, and the runs that it is about."""
    runs = Path(shutil.copytree(finished, tmp_path_factory.mktemp("full") / "runs"))
    return Read(made(runs, measure=True)), runs


@pytest.fixture
def runs(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "runs"))


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


def test_a_run_given_twice_counts_once(runs):
    (line,) = read_lines([runs / "fedavg-0", runs / "fedavg-0", runs / "fedavg-1" / ".." / "fedavg-0"])
    assert len(line.runs) == 1


def test_everything_that_was_recorded_or_measured_has_its_section(full):
    found, runs = full
    assert found.sections == EVERYWHERE | RECORDED | MEASURED
    assert (runs / "fedavg-0" / "landscape-eigen.npz").exists()
    assert not (runs / "fedavg-1" / "landscape-eigen.npz").exists()
    expected = ("λ1/λ5", "trace (Hutch++)", "gap of the pairs", "head", "fedsam(rho=0.05)")
    assert all(text in found.text for text in expected)
    links = {values["href"] for tag, values in found.elements if tag == "a" and values["href"] != "#content"}
    assert links == {f"#{name}" for name in found.sections}


def test_a_section_with_nothing_to_show_is_left_out(tmp_path):
    plain = written(tmp_path / "plain", [record(1, accuracy=0.5, loss=1.0)])
    assert Read(made(plain)).sections == EVERYWHERE
    begun = written(tmp_path / "begun", [])
    assert Read(made(begun)).sections == EVERYWHERE - {"learning"}


def test_every_figure_is_one_that_plotly_accepts(full):
    found = full[0].figures
    assert len(found) >= 15
    for figure in found:
        for form in figure.get("forms", {"": {}}).values():
            traces = [{**trace, **form.get("trace", {})} for trace in figure["data"]]
            go.Figure(traces, form.get("layout", figure["layout"]))


def test_each_place_for_a_figure_has_one_and_a_description_of_it(runs):
    found = Read(made(runs))
    places = [values for tag, values in found.elements if "data-figure" in values]
    assert [int(values["data-figure"]) for values in places] == [*range(len(found.figures))]
    assert all(values["aria-label"] and values["role"] in ("img", "application") for values in places)


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_splits_picture_has_a_cell_for_each_class_that_a_client_holds(counts):
    (trace,) = figures.split(counts)["data"]
    assert trace["z"] == [[row[label] or None for row in counts] for label in range(3)]


def test_the_picture_is_that_of_the_recipes_split_or_a_sentence_says_why_not(tmp_path, monkeypatch):
    content = collect([written(tmp_path / "digits", [], *TINY)], quiet)
    assert [*content.splits.values()] == [gather(load(None, TINY)).counts().tolist()]
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "nothing"))
    away = written(tmp_path / "away", [], "data=cifar10")
    assert "The split cannot be drawn here: " in Read(made(away)).text
    train(federate("digits", clients=3, alpha=1.0), rounds=1, engine="inline", out=tmp_path / "python")
    assert Read(made(tmp_path / "python")).text.count("made in Python") == 2


def test_surfaces_share_one_scale_and_steep_ones_are_drawn_by_their_logarithm():
    one, two = figures.surfaces([bowl(1.0), bowl(2.0, span=0.5)])
    for figure in (one, two):
        scene, surface = figure["layout"]["scene"], figure["forms"]["surface"]["trace"]
        assert scene["zaxis"]["range"] == [surface["cmin"], surface["cmax"]] == [0.5, 3.5]
        assert scene["xaxis"]["range"] == figure["forms"]["map"]["layout"]["xaxis"]["range"] == [-1.0, 1.0]
    assert one["data"][0]["z"][0][2] == 0.5 + 2.0  # at α = 0, β = −1: the rows are β
    (steep,) = figures.surfaces([bowl(1000.0)])
    assert steep["data"][0]["z"][2][0] == pytest.approx(np.log10(1000.5), rel=1e-4)
    assert steep["layout"]["scene"]["zaxis"]["ticktext"] == ["1", "3", "10", "30", "100", "300", "1000", "3000"]


def test_where_a_loss_overflowed_the_surface_has_a_hole_and_a_landscape_without_any_number_is_left_out(tmp_path):
    holes = bowl(1.0)
    holes.values[0, 0], holes.values[1, 0] = np.inf, np.nan
    (figure,) = figures.surfaces([holes])
    assert figure["data"][0]["z"][0][:2] == [None, None]
    run = written(tmp_path / "run", [record(1, loss=1.0)])
    Landscape(holes.axes, np.full((5, 5), np.nan), np.nan).save(run / "landscape-random.npz")
    assert "landscapes" not in Read(made(run)).sections


def test_a_landscape_along_a_line_is_a_curve(tmp_path):
    run = written(tmp_path / "run", [record(1, loss=1.0)])
    axis = np.linspace(-1, 1, 5)
    Landscape(axis[None], 1 + axis**2, 1.0).save(run / "landscape-eigen.npz")
    found = Read(made(run))
    (curve,) = found.figures[-1]["data"]
    assert (curve["x"], curve["y"]) == (axis.tolist(), (1 + axis**2).tolist())
    assert ("button", "form") not in [(tag, values.get("id")) for tag, values in found.elements]


def test_seeds_that_miss_the_target_are_counted(tmp_path):
    for seed, best in enumerate((0.9, 0.7, 0.95)):
        history = [record(n, accuracy=best * n / 4, loss=1.0) for n in range(1, 5)]
        written(tmp_path / f"{seed}", history, f"seed={seed}")
    text = Read(made(tmp_path, target=0.8)).text
    assert "rounds to target" in text
    assert "4 (2 of 3 seeds)" in text
    assert "0.8500 (0.7000 – 0.9500)" in text
    assert "rounds to target" not in Read(made(tmp_path)).text


def test_accuracy_by_traffic_counts_what_was_sent_both_ways():
    line = Line("line", (run_of([record(n, accuracy=n / 10) for n in (1, 2, 3)]),))
    (trace,) = figures.traffic([line], most=100)["data"]
    assert (trace["x"], trace["y"]) == ([4.0, 8.0, 12.0], [0.1, 0.2, 0.3])


def test_nothing_that_comes_from_a_run_becomes_markup(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    refused = [{"client": 1, "reason": evil, "detail": evil * 20}]
    history = [record(1, accuracy=0.1, loss=1.0, refused=refused)]
    name = evil.replace("/", "∕")  # a slash would end it
    path = written(tmp_path / name, history, f"method={evil}")
    bowl(1.0).save(path / f"landscape-{name}.npz")
    clean = Read(made(written(tmp_path / "clean", history)))
    found = Read(made(path))
    assert not [tag for tag, _ in found.elements if tag == "img"]
    assert len(found.scripts) == len(clean.scripts) == 3
    assert "alert(1)</script>" in found.text
    names = {trace["name"] for figure in found.figures for trace in figure["data"] if "name" in trace}
    assert names and not any("<" in name for name in names)


def test_a_directory_whose_name_is_no_text_is_shown_as_well_as_it_can_be(tmp_path):
    path = written(tmp_path / "caf\udce9", [record(1, accuracy=0.1, loss=1.0)])
    assert "caf?" in Read(made(path)).text


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_script_but_its_own(runs):
    found = Read(made(runs))
    linked = [v for _, values in found.elements for name, v in values.items() if name in ("src", "href", "action")]
    assert all(address.startswith(("#", "data:")) for address in linked)
    (policy,) = (values["content"] for _, values in found.elements if values.get("http-equiv"))
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in found.scripts[1:]]
    assert policy.startswith("default-src 'none'; ")
    assert re.findall(r"'sha256-(.*?)'", policy) == hashes


def test_equal_runs_make_equal_pages(runs):
    assert made(runs) == made(runs)


def test_a_long_run_of_many_classes_stays_below_the_limit_and_keeps_its_last_round():
    rounds, chance = 5000, np.random.default_rng(0)
    shown, names = chance.random((50, 200)).tolist(), ("accuracy", "loss", "consistency")
    history = [
        record(n, class_accuracy=shown[n % 50], **dict(zip(names, chance.random(3).tolist(), strict=True)))
        for n in range(1, rounds + 1)
    ]
    lines = [Line(f"line {k}", (run_of(history, f"local.lr={k + 1}.5"),)) for k in range(12)]
    made = page(Content(lines, None, {}, {}, {}))
    assert len(made) <= LIMIT
    curves = [trace for figure in Read(made).figures for trace in figure["data"] if trace["type"] == "scatter"]
    assert {trace["x"][-1] for trace in curves} == {rounds, 4.0 * rounds}


def test_too_many_runs_for_one_page_are_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr("fedflat.report.page.LIMIT", 5_000)
    with pytest.raises(RunError, match="give fewer runs at a time"):
        page(Content([Line("line", (run_of([]),))], None, {}, {}, {}))


def test_a_line_that_is_still_being_written_does_not_count_and_a_damaged_one_is_named(tmp_path):
    path = written(tmp_path / "run", [record(1), record(2)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "byt')
    assert [each["round"] for each in read_run(path).history] == [1, 2]
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 3 is no round's record"):
        read_run(path)


def test_without_plotly_one_sentence_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(RecipeError, match=r"pip install 'fedflat\[report\]'"):
        made(runs)


def test_neighbouring_lines_differ_in_colour_and_dash():
    looks = [tuple(figures.style(place).values()) for place in range(35)]
    assert len(set(looks)) == 35
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks))


def luminance(colour):
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", ["#ffffff", "#171c22"])
def test_the_first_four_lines_stand_out_from_either_ground(ground):
    for colour in figures.COLOURS[:4]:
        light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 2.9


def test_one_curve_of_one_round_is_a_point():
    figure = figures.bands([(0, "a", Band([1], [0.5], [0.5], [0.5]))], "accuracy", most=10)
    assert [trace["mode"] for trace in figure["data"]] == ["markers"]


@pytest.fixture
def fedflat(runs, monkeypatch, capsys):
    """The command line, in this process and in the runs' directory."""
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "path", [*sys.path])
    terminated = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedflat", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, terminated)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["fedavg-0"], "fedavg-0/report.html"),
        (["."], "report.html"),
        (["fedavg-0", "fedsam-0"], "report.html"),
        (["fedavg-0", "-o", "there.html"], "there.html"),
    ],
)
def test_the_command_writes_the_page_and_says_where(fedflat, arguments, place):
    code, printed, complaint = fedflat("report", *arguments)
    assert (code, complaint) == (0, "")
    assert printed.startswith(f"written to {place} (")
    assert Path(place).read_bytes().startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nowhere"], 6, "nowhere: no run is here"),
        (["fedavg-0/checkpoints/00000004.json"], 6, "00000004.json: a report is about a whole run; give its directory"),
        (["fedavg-0", "-o", "no/where.html"], 6, "no/where.html: cannot be written"),
        (["fedavg-0", "--target", "7"], 2, "'--target': 7.0 is not in the range"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(fedflat, arguments, code, sentence):
    ended, printed, complaint = fedflat("report", *arguments)
    assert (ended, printed) == (code, "")
    assert sentence in complaint
    assert len(complaint.strip().splitlines()) == 1


def test_recipe_and_commands_of_the_page_repeat_its_runs_to_the_bit(fedflat):
    recipe, commands = Read(made(Path("fedsam-0"), Path("fedsam-1"))).folds
    Path("recipe.toml").write_text(recipe)
    for seed, command in enumerate(commands.splitlines()):
        assert fedflat(*shlex.split(command)[1:])[0] == 0
        again, before = (read_run(Path(path)).history for path in (f"again/{seed}", f"fedsam-{seed}"))
        assert [each | {"seconds": 0} for each in again] == [each | {"seconds": 0} for each in before]
