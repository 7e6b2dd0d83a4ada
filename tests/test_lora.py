"""Federated fine-tuning by low-rank adapters: the base never changes, and everything else costs what adapters cost."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedflat import train
from fedflat.errors import RecipeError
from fedflat.flatness import Portion, measure
from fedflat.methods.parser import parse
from fedflat.models import Network, build, lora, merged
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.export import export
from fedflat.runs.loading import load_run

PRODUCT = "fedflat.methods.parts:ProductAverage"
RANK = 2
D = RANK * (64 + 16) + RANK * (16 + 10)  # of both layers' adapters


def base(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


SETTINGS = dict(rounds=2, cohort=3, engine="inline", model_lora={"rank": RANK, "targets": "all"})


@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedsam(0.05)", "fedasam", "fedsmoo", "fedsol", "fedgamma", "fedavg + man(0.1)", "fedavg + adamw",
     "fedavg + muon", f"fedavg + {PRODUCT}", f"fedsmoo + {PRODUCT}", "fedavg + median"],
)  # fmt: skip
def test_every_method_trains_the_adapters_alone(digits, method):
    module = base()
    result = train(digits, module, method, lr=0.01, weight_decay=0.01, **SETTINGS)
    for name, parameter in module.named_parameters():
        assert torch.equal(result.model.get_parameter(name), parameter), name
    first = lora(module, RANK, targets="all")
    assert Network(deepcopy(result.model)).base_digest == Network(first).base_digest
    assert all(float(result.model[i].lora_b.detach().norm()) > 0 for i in (1, 3))
    assert result.history[-1]["local_loss"] < result.history[0]["local_loss"]


def test_bytes_memory_and_the_summary_are_those_of_the_adapters(digits, tmp_path):
    result = train(digits, base(), "scaffold", out=tmp_path, **SETTINGS)
    assert all(r["bytes_down"] == r["bytes_up"] == 3 * 2 * 4 * D for r in result.history)
    total = 64 * 16 + 16 + 16 * 10 + 10 + D
    kept = {
        name: json.loads((tmp_path / "summary.json").read_text())[name] for name in result.summary if "param" in name
    }
    assert kept == {"parameters_trained": D, "parameters": total}
    files = (tmp_path / "checkpoints").glob("*.safetensors")
    assert {v.numel() for file in files for v in load_file(file).values()} <= {0, D, 5}


@pytest.mark.parametrize("method", ["fedsam", f"fedsam + {PRODUCT}"])
def test_engines_and_groups_agree(digits, method):
    settings = {**SETTINGS, "cohort": 8, "precision": "float64", "workers": 2, "method": method}
    inline, pool = (train(digits, base(), **settings | {"engine": name}) for name in ("inline", "pool"))
    together = train(digits, base(), group=4, **settings)
    for one, other, third in zip(*(run.model.parameters() for run in (inline, pool, together)), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, third, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fedsam(0.5)",
        "fedsmoo",
        "fedsol(rho=0.5, radius='fixed')",
        "fedavg + man(0.5)",
        "feddyn + fedsam(0.5)",
    ],
)
def test_adapters_of_full_rank_whose_a_stays_are_full_training_of_the_layer(digits, method):
    """With A = I/2 and s = 2 the layer's weight is W + B: SAM, its radius and all, is that of full training."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 10))
    full, low = deepcopy(module).requires_grad_(False), lora(module, 8, alpha=16.0, targets="3")
    full[3].weight.requires_grad_(True)
    low[3].lora_a.data.copy_(torch.eye(8) / 2)
    low[3].lora_a.requires_grad_(False)
    settings = dict(rounds=2, cohort=3, batch=20, engine="inline", precision="float64", momentum=0.9)
    ours, theirs = (train(digits, each, method, **settings).model for each in (low, full))
    assert not torch.allclose(theirs[3].weight.float(), module[3].weight, atol=1e-2)
    torch.testing.assert_close(merged(ours)[3].weight, theirs[3].weight, rtol=1e-9, atol=1e-11)


# --------------------------------------------------------------------------------------------------------------------
# Recipes, runs and exports
# --------------------------------------------------------------------------------------------------------------------

CENTRAL = ["model.hidden=[16]", "server.rounds=1", "engine.name=inline", "split.clients=8", "server.cohort=3"]


@pytest.fixture(scope="module")
def central(tmp_path_factory):
    """A finished run whose model is the base of others."""
    folder = tmp_path_factory.mktemp("runs") / "central"
    execute(prepare(load(None, CENTRAL)), folder)
    return folder


def tuned(central, *changes):
    return load(None, [*CENTRAL, f"model.base={central}", *changes])


ADAPTERS = ("model.lora={rank = 2, targets = 'all'}",)


def test_a_recipe_names_base_and_adapters_and_a_run_records_the_digest(central, tmp_path):
    problem = prepare(tuned(central, *ADAPTERS))
    recorded = json.loads((central / "summary.json").read_text())["model_sha256"]
    assert problem.recipe.model.base_sha256 == recorded and problem.network.size == D
    expected = load_file(central / "model.safetensors")
    assert all(torch.equal(problem.network.module.state_dict()[name], tensor) for name, tensor in expected.items())
    execute(problem, tmp_path / "run")
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert f'base_sha256 = "{recorded}"' in text
    assert 'lora = {rank = 2, targets = "all", also = [], average = "factors"}' in text


def test_full_fine_tuning_begins_with_the_base(central):
    expected = load_file(central / "model.safetensors")
    problem = prepare(tuned(central))
    assert problem.network.size == sum(tensor.numel() for tensor in expected.values())
    assert all(torch.equal(problem.network.module.state_dict()[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("average", ["factors", "product"])
def test_a_run_is_read_measured_and_exported(central, tmp_path, average):
    run = tmp_path / "run"
    problem = prepare(tuned(central, *ADAPTERS, "local.epochs=3", f"model.lora.average={average}"))
    assert ("ProductAverage" in repr(problem.method)) == (average == "product")
    execute(problem, run)
    some, whole = (load_run(run, parameters=which) for which in ("trained", "all"))
    assert (some.network.size, whole.network.size) == (D, 64 * 16 + 16 + 16 * 10 + 10)
    found = [measure(Portion(100).pooled(each), k=1, products=6) for each in (some, whole)]
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)
    assert found[0].log10_capacity == pytest.approx(found[1].log10_capacity, rel=1e-5)
    assert found[0].spectrum.eigenvalues != pytest.approx(found[1].spectrum.eigenvalues, rel=1e-2)
    export(run, tmp_path / "export", onnx=False)
    adapters, model = (load_file(tmp_path / "export" / f"{name}.safetensors") for name in ("adapters", "model"))
    trained = some.network.layout.views(some.network.weights)
    assert adapters.keys() == trained.keys() and all(torch.equal(adapters[name], trained[name]) for name in trained)
    assert all(bool(tensor.any()) for tensor in adapters.values())
    plain = build("mlp", (1, 8, 8), 10, hidden=(16,))
    plain.load_state_dict(model)
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(plain(x), some.network.module(x))
    assert str(central) not in (tmp_path / "export" / "recipe.toml").read_text()
    # The merged model is a base for the next run.
    assert prepare(tuned(tmp_path / "export")).recipe.model.base_sha256


def test_a_finished_run_needs_its_base_no_more(central, tmp_path):
    copied = tmp_path / "base.safetensors"
    copied.write_bytes((central / "model.safetensors").read_bytes())
    execute(prepare(tuned(copied, *ADAPTERS)), tmp_path / "run")
    copied.unlink()
    assert load_run(tmp_path / "run").network.size == D
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("*.json")
    with pytest.raises(RecipeError, match=r"model.base = '.*': no model is here \(there is none\)"):
        load_run(checkpoint)


def spoiled(path, **changes):
    tensors = load_file(path)
    save_file({**tensors, **changes}, path)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.unlink(), "no model is here"),
        (lambda path: path.write_bytes(b"\x80\x05cos\nsystem\n"), "not a readable safetensors file"),
        (
            lambda path: path.write_bytes(bytes(5_000_000)),
            "has 5,000,000 bytes, and this network",
        ),
        (lambda path: spoiled(path, more=torch.ones(2)), r"more is \(2,\), but should be nothing"),
        (
            lambda path: spoiled(path, **{"head.weight": torch.full((10, 16), torch.nan)}),
            "head.weight holds numbers that",
        ),
        (lambda path: spoiled(path, **{"hidden1.lora_a": torch.ones(1)}), "has adapters; `fedflat export` it"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_in_one_sentence(central, tmp_path, spoil, sentence):
    path = tmp_path / "base.safetensors"
    path.write_bytes((central / "model.safetensors").read_bytes())
    spoil(path)
    with pytest.raises(RecipeError, match=rf"^model.base(: | = '){path}.*{sentence}"):
        prepare(tuned(path))


def test_another_file_than_the_recipe_says_is_refused(central):
    with pytest.raises(RecipeError, match=r"has the SHA-256 .*…, but model.base_sha256 says abc…$"):
        prepare(tuned(central, "model.base_sha256=abc"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("model.lora.rank=0", "model.lora.rank = 0: input should be greater than or equal to 1 "),
        ("model.lora.ranks=1", "model.lora.ranks: there is no such field; did you mean model.lora.rank"),
        ("model.lora.targets=conv", "lora: targets = 'conv' matches no layer; "),
        ("model.lora.rank=99", "lora: rank = 99, but fc1 has 64 inputs and 16 outputs, so its rank is from 1 to 16; "),
    ],
)
def test_mistakes_in_the_table_are_named(change, sentence):
    with pytest.raises(RecipeError, match=sentence):
        prepare(load(None, [*CENTRAL, *ADAPTERS, change]))


def test_an_override_changes_one_field_of_the_table():
    recipe = load(None, [*ADAPTERS, "model.lora.rank=4"])
    assert (recipe.model.lora.rank, recipe.model.lora.targets) == (4, "all")


def test_products_are_averaged_only_where_there_are_adapters(digits):
    with pytest.raises(
        RecipeError, match=r"^method: ProductAverage averages the products of .*, and the model has none; "
    ):
        train(digits, base(), f"fedavg + {PRODUCT}", rounds=1)
    assert parse(f"fedavg + {PRODUCT}").parts
