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
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from recorded import record, run_of, written

from fedflat import federate, train
from fedflat.cli import main
from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Film, Landscape, Trajectory
from fedflat.recipe import load
from fedflat.report import figures
from fedflat.report.lines import Line, read_run
from fedflat.report.page import LIMIT, collect, page
from fedflat.report.sections import Content
from fedflat.runs.build import gather, prepare
from fedflat.runs.experiment import execute

TINY = ["split.clients=5", "split.alpha=0.5", "model.hidden=[8]", "server.rounds=4", "engine=inline"]
RICH = ['evaluation.measures=["consistency","divergence","discord","local","classes"]', "evaluation.sharpness=4",
        "evaluation.target=0.3", "admission.max_ratio=1.01"]  # fmt: skip
EVERYWHERE = {"runs", "results", "learning", "split", "repeat"}
RECORDED = {"classes", "local", "rounds", "refused"}
MEASURED = {"glance", "flatness", "landscapes", "duality"}


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
            problem = prepare(load(None, [*TINY, *RICH, f"seed={seed}", f"method={method}"]))
            execute(problem, base / f"{method[:6]}-{seed}")
    return base


@pytest.fixture(scope="module")
def full(finished, tmp_path_factory):
    """Their page with all that can be measured, and the runs that it is about."""
    runs = Path(shutil.copytree(finished, tmp_path_factory.mktemp("full") / "runs"))
    return Read(made(runs, measure=True)), runs


@pytest.fixture
def runs(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "runs"))


def test_everything_that_was_recorded_or_measured_has_its_section(full):
    found, runs = full
    assert found.sections == EVERYWHERE | RECORDED | MEASURED
    assert (runs / "fedavg-0" / "landscape-eigen.npz").exists()
    assert not (runs / "fedavg-1" / "landscape-eigen.npz").exists()
    expected = ("λ1/λ5", "trace [95 %]", "gap of the pairs", "head", "fedsam(rho=0.05)", "flatness distance")
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


def test_the_picture_is_that_of_the_recipes_split_or_a_sentence_says_why_not(tmp_path, monkeypatch):
    content = collect([written(tmp_path / "digits", [], *TINY)], quiet)
    assert [*content.splits.values()] == [gather(load(None, TINY)).counts().tolist()]
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "nothing"))
    away = written(tmp_path / "away", [], "data=cifar10")
    assert "The split cannot be drawn here: " in Read(made(away)).text
    python = federate("digits", [[0, 1, 2], [3, 4]])
    train(python, rounds=1, engine="inline", out=tmp_path / "python")
    assert [*collect([tmp_path / "python"], quiet).splits.values()] == [python.counts().tolist()]
    assert Read(made(tmp_path / "python")).text.count("made in Python") == 1  # no command repeats it
    (tmp_path / "python/split.npz").unlink()
    assert Read(made(tmp_path / "python")).text.count("made in Python") == 2


def test_where_a_loss_overflowed_the_surface_has_a_hole_and_a_landscape_without_any_number_is_left_out(tmp_path):
    holes = bowl(1.0)
    holes.values[0, 0], holes.values[1, 0] = np.inf, np.nan
    (figure,) = figures.surfaces([Film([0], [holes])])
    assert figure["frames"][0]["z"][0][:2] == [None, None]
    run = written(tmp_path / "run", [record(1, loss=1.0)])
    Landscape(holes.axes, np.full((5, 5), np.nan), np.nan).save(run / "landscape-random.npz")
    assert "landscapes" not in Read(made(run)).sections


def test_a_landscape_along_a_line_is_a_curve(tmp_path):
    run = written(tmp_path / "run", [record(1, loss=1.0)])
    axis = np.linspace(-1, 1, 5)
    Landscape(axis[None], 1 + axis**2, 1.0).save(run / "landscape-eigen.npz")
    found = Read(made(run))
    (curve,) = found.figures[0]["data"]
    assert (curve["x"], curve["y"]) == (axis.tolist(), (1 + axis**2).tolist())
    assert ("button", "form") not in [(tag, values.get("id")) for tag, values in found.elements]


def flat(lambda1, trace, adaptive=0.25, samples=300):
    """A record as `fedflat flatness` writes it."""
    estimate = {"mean": trace, "error": 0.5, "probes": 12}
    spectrum = {"eigenvalues": [lambda1, lambda1 / 2], "residuals": [0.0, 0.0], "ratio": 2.0, "products": 9, "bytes": 0,
                "trace": estimate, "trace_plus_plus": estimate, "density": None}  # fmt: skip
    names = ("ascent_sharpness", "average_sharpness", "average_sharpness_error", "weight_norm", "log10_capacity")
    return {"samples": samples, "loss": 0.1, "spectrum": spectrum, "adaptive_sharpness": adaptive, "layers": [],
            **dict.fromkeys(names, 1.0)}  # fmt: skip


def test_the_page_opens_with_the_recorded_flatness_and_intervals_over_seeds(tmp_path):
    for seed, (lambda1, trace) in enumerate([(2.0, 10.0), (3.0, 12.0), (4.0, 11.0)]):
        for method, factor in (("fedavg", 1), ("fedsam", 0.5)):
            history, settings = [record(1, accuracy=0.9, loss=1.0)], (f"seed={seed}", f"method={method}")
            run = written(tmp_path / f"{method}-{seed}", history, *settings)
            (run / "flatness.json").write_text(json.dumps(flat(factor * lambda1, trace)))
    found = Read(made(tmp_path))
    assert next(values["id"] for tag, values in found.elements if tag == "section") == "glance"
    # t of two degrees of freedom is 4.303; the deviation of (2, 3, 4) is 1, that of its halves and differences ½
    assert "3.0 ± 2.5" in found.text and "1.5 ± 1.2" in found.text and "−1.5 ± 1.2" in found.text
    assert "adaptive sharpness (scale-invariant)" in found.text
    assert "Mean over 3 seeds" in found.text
    assert (
        found.text.index("Flatness at a glance") < found.text.index("fedsam − fedavg") < found.text.index("Runs that")
    )


def test_one_seed_has_the_interval_of_its_trace_alone(tmp_path):
    run = written(tmp_path / "run", [record(1, accuracy=0.9, loss=1.0)])
    (run / "flatness.json").write_text(json.dumps(flat(2.0, 10.0)))
    text = Read(made(run)).text
    assert "10.0 ± 1.0" in text and "One seed" in text and "Paired differences" not in text


def test_the_page_follows_the_metric_of_another_task(tmp_path):
    """R² beside the flatness, and a target that an accuracy cannot have."""
    history = [record(1, r2=-2.5, mse=9.0, loss=9.0), record(2, r2=0.125, mse=3.0, loss=3.0)]
    run = written(tmp_path / "run", history, "task=regression", "evaluation.metric=r2", "evaluation.best=highest")
    (run / "flatness.json").write_text(json.dumps(flat(2.0, 10.0)))
    found = Read(made(run, target=-3.0))
    assert "0.125" in found.text and "Target: r2 -3." in found.text
    assert "accuracy" not in found.text and "nan" not in found.text
    assert "Target: r2 0." in Read(made(run, target=0.0)).text
    with pytest.raises(RecipeError, match="'--target': inf is not a finite number"):
        made(run, target=float("inf"))


@pytest.mark.parametrize("wrong", [b"{}", b"[1]", b"null", b"{", b"[" * 100_000, b'{"samples": "x", "spectrum": 3}'])
def test_a_damaged_record_of_flatness_is_one_sentence(tmp_path, wrong):
    run = written(tmp_path / "run", [record(1, accuracy=0.9, loss=1.0)])
    (run / "flatness.json").write_bytes(wrong)
    with pytest.raises(RunError, match=r"flatness\.json: not a record of flatness, or a damaged one"):
        made(run)


def test_landscapes_over_the_rounds_have_a_slider_and_a_frame_for_each_round(tmp_path):
    for name, rounds in (("a", [0, 5, 10]), ("b", [0, 10])):
        run = written(tmp_path / name, [record(1, loss=1.0)], f"local.lr=0.{len(rounds)}")
        Film(rounds, [bowl(1.0 + k) for k in range(len(rounds))]).save(run / "landscapes-eigen.npz")
    found = Read(made(tmp_path))
    (slider,) = (values for tag, values in found.elements if values.get("type") == "range")
    assert (slider["data-rounds"], slider["max"], slider["value"]) == ("[0, 5, 10]", "2", "2")
    drawn = [figure for figure in found.figures if "frames" in figure]
    assert [[frame["round"] for frame in figure["frames"]] for figure in drawn] == [[0, 5, 10], [0, 10]]
    assert [figure["frames"][-1]["z"][0][2] for figure in drawn] == [0.5 + 2 * 3.0, 0.5 + 2 * 2.0]
    assert {json.dumps(figure["layout"]["scene"]["camera"]) for figure in drawn} == {
        json.dumps(drawn[0]["layout"]["scene"]["camera"])
    }


def test_a_trajectory_has_its_section_with_rounds_clients_and_average(tmp_path):
    run = written(tmp_path / "run", [record(1, loss=1.0)])
    path = np.array([[-1.0, 0.0], [0.5, 0.2], [0.0, 0.0]])
    of = {
        "rounds": np.arange(3),
        "path": path,
        "losses": np.ones(3),
        "off": np.zeros(3),
        "shares": np.array([0.9, 0.1]),
    }
    clients = {"clients": np.array([4, 7]), "clients_path": path[:2], "clients_off": np.zeros(2), "ends": path[1:]}
    Trajectory(**of, **clients, local_round=3, surface=bowl(1.0)).save(run / "trajectory.npz")
    found = Read(made(run))
    assert "trajectory" in found.sections
    (figure,) = (each for each in found.figures if each["data"][0]["type"] == "contour")
    below, rounds, legs, scattered, average = figure["data"]
    assert below["z"][0][2] == 2.5
    assert (rounds["x"], rounds["text"][0]) == ([-1.0, 0.5, 0.0], "round 0: loss 1, 0 from the plane")
    assert legs["x"] == [0.5, -1.0, None, 0.5, 0.5, None]
    assert scattered["text"] == ["client 4, round 3", "client 7, round 3"] and average["x"] == [0.0]
    go.Figure(figure["data"], figure["layout"])


def test_seeds_that_miss_the_target_are_counted(tmp_path):
    for seed, best in enumerate((0.9, 0.7, 0.95)):
        history = [record(n, accuracy=best * n / 4, loss=1.0) for n in range(1, 5)]
        written(tmp_path / f"{seed}", history, f"seed={seed}")
    text = Read(made(tmp_path, target=0.8)).text
    assert "rounds to target" in text
    assert "4 (2 of 3 seeds)" in text
    assert "0.8500 (0.7000 – 0.9500)" in text
    assert "rounds to target" not in Read(made(tmp_path)).text


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


def test_without_plotly_one_sentence_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(RecipeError, match=r"pip install 'fedflat\[report\]'"):
        made(runs)


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
        (["fedavg-0/checkpoints/00000004.json"], 6, "00000004.json: a report needs a whole run; give its directory"),
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
