"""Recipes: every value shown, every mistake named."""

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedflat.errors import FedflatError, RecipeError
from fedflat.recipe import PRESETS, Recipe, load, validated


def test_another_engine_keeps_the_device_and_how_clients_train_on_it(tmp_path):
    (tmp_path / "gpu.toml").write_text('engine = { device = "cuda", graph = true, group = 1, workers = 3 }\n')
    engine = load(str(tmp_path / "gpu.toml"), ["engine=inline"]).engine
    assert (engine.name, engine.device, engine.graph, engine.group, engine.workers) == ("inline", "cuda", True, 1, 3)


@pytest.mark.parametrize("name", PRESETS)
def test_a_printed_recipe_loads_to_itself(name):
    recipe = load(name)
    assert validated(tomllib.loads(recipe.to_toml())) == recipe


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("local.lrr=1", "local.lrr: there is no such field; did you mean local.lr?"),
        ("sever.rounds=3", "sever: there is no such field; did you mean server?"),
        ("local.lr=-1", "local.lr = -1: input should be greater than 0 (learning rate η of round 0)"),
        ("local.momentum=1.0", "local.momentum = 1.0: input should be less than 1"),
        ("local.lr=fast", "local.lr = 'fast': input should be a valid number"),
        ("local.epochs=1.5", "local.epochs = 1.5: input should be a valid integer"),
        ("server.cohort=1.5", "server.cohort = 1.5: must be a whole count, or a ratio above 0 up to 1.0"),
        ("server.cohort=0", "server.cohort = 0: input should be greater than 0"),
        ("engine=cluster", "engine.name = 'cluster': input should be 'auto', 'inline', 'pool' or 'ray'"),
        ("local=3", "local = 3: input should be a valid"),
        ("local.clip_mode=some", "local.clip_mode = 'some': input should be 'loss_only', 'official' or 'all'"),
        ("server.stop_loss=0", "server.stop_loss = 0: input should be greater than 0"),
        ("server.stop_loss=0.1 evaluation.every=0", "server.stop_loss = 0.1: the loss is looked at when the model is"),
        ("data.normalise=false data.mean=[0.5]", "data.normalise = False: inputs stay in [0, 1], so leave data.mean"),
        ("rounds", "--set rounds: write it as section.field=value"),
    ],
)
def test_mistakes_are_named_in_one_sentence(override, sentence):
    with pytest.raises(RecipeError) as caught:
        load(None, override.split())
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_file_may_build_on_a_preset_and_state_only_what_differs(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "sol"\nmethod = "fedavg"\n[server]\nrounds = 7\n')
    recipe = load(file)
    assert (recipe.method, recipe.server.rounds, recipe.local.momentum) == ("fedavg", 7, 0.9)


def test_another_split_drops_the_old_ones_options_but_not_the_number_of_clients():
    recipe = load("sol", ["split=iid"])
    assert (recipe.split.name, recipe.split.clients, recipe.split.alpha) == ("iid", 100, None)


@pytest.mark.parametrize("content", ["[local\nlr=1", "\xff\xfe", "lr = "])
def test_a_broken_file_is_named(tmp_path, content):
    file = tmp_path / "broken.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(RecipeError, match=r"broken\.toml"):
        load(file)


def test_a_missing_file_is_named_with_the_nearest_preset():
    with pytest.raises(RecipeError, match=r"sool: no such recipe file, and no preset of that name; did you mean sol\?"):
        load("sool")


def test_the_presets_have_the_settings_of_the_papers():
    smoo, sol, man = (load(name) for name in ("smoo", "sol", "man"))
    assert (smoo.local.lr, smoo.local.momentum, smoo.local.weight_decay, smoo.local.clip) == (0.1, 0, 1e-3, 10)
    assert (smoo.server.sampling, smoo.server.average, smoo.local.lr_decay) == ("bernoulli", "uniform", 0.998)
    assert (sol.local.lr, sol.local.momentum, sol.local.weight_decay, sol.local.clip) == (0.01, 0.9, 1e-5, 0)
    assert (sol.server.sampling, sol.server.average, sol.local.lr_decay) == ("uniform", "samples", 0.99)
    assert (man.model.name, man.split.name, man.split.refill, man.server.rounds) == ("lenet64", "dirichlet", False, 500)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
def test_whatever_stands_in_a_section_the_answer_is_a_recipe_or_one_sentence(value):
    for section in ("data", "split", "model", "local", "server", "evaluation", "engine", "seed", "precision"):
        outcome = recipe_or_sentence({section: value})
        assert isinstance(outcome, Recipe) or (section in outcome and "\n" not in outcome)


def recipe_or_sentence(table):
    try:
        return validated(table)
    except RecipeError as error:
        return str(error)


DEEP = "[" * 50_000 + "]" * 50_000
HUGE = "1" + "0" * 5_000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"seed = {DEEP}", r"mine\.toml: not valid TOML: it is nested too deeply"),
        (f"seed = {HUGE}", r"mine\.toml: not valid TOML: Exceeds the limit"),
        ("seed = 0x" + "f" * 9000, r"seed = 0xf*… \(9,002 characters\): does not fit into 64 bits"),
        ("seed = 10000000000000000000000", "seed = 0x21e19e0c9bab2400000: does not fit into 64 bits"),
        ("[local]\nbatch = 9223372036854775808", "local.batch = 0x8000000000000000: does not fit into 64 bits"),
        ("[model]\nhidden = [99999999999999999999]", "model.hidden = 0x56bc75e2d630fffff: does not fit"),
        ("[method]\nname = 'fedsam'\nrho = nan", "method.rho = nan: is not a number"),
        ("[split]\nname = 'sizes'\nsizes = [1.0, nan]", "split.sizes = nan: is not a number"),
        ("[data]\nmean = [nan]", "data.mean = nan: is not a number"),
        (f"method = {'[' * 40 + ']' * 40}", "method: is nested too deeply"),
        (".".join("a" * 100) + " = 1", "nested too deeply|there is no such field"),
        ("method = '" + "fedavg + " * 2000 + "fedavg'", r"method: has 18,006 characters, and 10,000 are the most"),
        ("preset = '" + "x" * 20_000 + "'", "preset"),
        ("# " + "x" * 2**20, "has more than 1,048,576 bytes, too many for a recipe"),
        ("local = 3\nseed = '" + "y" * 5000 + "'", r"seed = 'yyy.*… \(5,002 characters\)"),
    ],
)
def test_extremes_end_in_one_sentence(tmp_path, text, sentence):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(RecipeError, match=sentence) as caught:
        load(tmp_path / "mine.toml")
    assert len(str(caught.value)) < 30_000


@pytest.mark.parametrize(
    "override", [f"seed={DEEP}", f"seed={HUGE}", "seed=1e400", "local.lr=nan", ".".join("a" * 9999) + "=1"]
)
def test_so_do_extremes_on_the_command_line(override):
    with pytest.raises(RecipeError):
        load(None, [override])


@pytest.mark.parametrize("name", ["recipe.toml", "sweep.toml"])
@pytest.mark.parametrize("text", [f"a = {DEEP}", f"a = {HUGE}", "\xff", "a = "])
def test_so_do_those_of_a_run_and_of_a_sweep(tmp_path, name, text):
    from fedflat.runs import load_sweep, read_recipe

    (tmp_path / name).write_text(text, "latin-1")
    with pytest.raises(FedflatError, match=name):
        read_recipe(tmp_path) if name == "recipe.toml" else load_sweep(tmp_path / name)


@pytest.mark.parametrize(
    "method",
    ["fedavg + " * 900 + "fedavg", "+".join(["swa"] * 1000), "(" * 5000 + ")" * 5000, "-" * 9000 + "1", "x" * 10**6,
     "fedsam(" + "[" * 3000 + "]" * 3000 + ")", "fedsam(" + "-" * 3000 + "1)", ["fedavg"] * 100, f"fedsam({HUGE})"],
    ids=range(9),
)  # fmt: skip
def test_long_methods_end_in_one_sentence(method):
    from fedflat.methods import parse

    with pytest.raises(RecipeError, match=r"^method"):
        parse(method)


def test_only_a_limit_may_be_infinite():
    assert validated({"admission": {"max_norm": math.inf}}).admission.max_norm == math.inf
    for table in ({"admission": {"max_norm": -math.inf}}, {"local": {"lr": math.inf}}):
        with pytest.raises(RecipeError, match="must be a finite number"):
            validated(table)
