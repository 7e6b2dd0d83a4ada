"""Training a part of a model: frozen weights are a constant of the problem, and nothing else is left of them.

The oracle of linear probing: a frozen body φ below a trained head is a linear model of the samples φ(x). Both must
train alike, whatever the method does with its vectors, and cost the same bytes.
"""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from fedflat import Dataset, Samples, train, trust
from fedflat.errors import RecipeError, RunError
from fedflat.flatness import measure
from fedflat.flatness.federated import Portion
from fedflat.local.rule import LocalRule
from fedflat.local.step import train as local_train
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local, load
from fedflat.rounds.setup import Problem
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.export import export
from fedflat.runs.loading import load_run
from fedflat.runs.personal import personalise

D = 8 * 10 + 10  # weights of the trained head


def probe(seed=0):
    """A random body that is frozen, and a head that is trained."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    module[1].requires_grad_(False)
    return module


@pytest.fixture(scope="module")
def small(digits):
    return digits.to(torch.float64)


@pytest.fixture(scope="module")
def featured(small):
    """The federation of the samples φ(x)."""
    body = probe().double()[:3]
    with torch.no_grad():
        parts = [(body(x), y) for x, y in (small.held_out(part, 0, small.size(part)) for part in ("train", "test"))]
    return replace(small, dataset=Dataset("features", *(Samples(*part) for part in parts), 10, (), ()))


SETTINGS = dict(rounds=2, cohort=3, batch=16, momentum=0.9, weight_decay=0.05, engine="inline", precision="float64")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedavg", dict(clip=0.3, clip_mode="all")),
        ("fedavg", dict(sharpness=1, sharpness_samples=300, measures=["gradient", "margin"])),
        ("fedavg + adamw", {}),
        ("fedavg + muon", {}),
        ("fedsam(0.5)", {}),
        ("fedasam", {}),
        ("fedprox", {}),
        ("feddyn", {}),
        ("scaffold", {}),
        ("fedsmoo", {}),
        ("fedsol", {}),
        ("fedsol(scope='head')", {}),
        ("fedgf", {}),
        ("perfedavg", {}),
        ("top_eigenvalue", {}),
        ("fedavg + central_dp(0.1, 1.0)", dict(sampling="bernoulli")),
        ("fedavg + local_dp(0.1, 1.0)", {}),
    ],
)
def test_linear_probing_is_a_linear_model_of_the_features(small, featured, method, settings):
    head = nn.Linear(8, 10)
    head.load_state_dict(probe()[3].state_dict())
    ours, theirs = (train(f, m, method, **SETTINGS | settings) for f, m in ((small, probe()), (featured, head)))
    assert torch.equal(ours.model[1].weight, probe()[1].weight.double())
    assert not torch.equal(ours.model[3].weight, probe()[3].weight.double())
    for a, b in zip(ours.model[3].parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for here, there in zip(ours.history, theirs.history, strict=True):
        assert {k: v for k, v in here.items() if k != "seconds"} == {
            k: v if isinstance(v, list | str) or v is None else pytest.approx(v, rel=1e-7)
            for k, v in there.items()
            if k != "seconds"
        }


def test_only_trained_weights_are_counted_in_bytes(digits):
    result = train(digits, probe(), "scaffold", rounds=1, cohort=3, engine="inline")
    down, up = result.history[0]["bytes_down"], result.history[0]["bytes_up"]
    assert (down, up) == (3 * 2 * 4 * D, 3 * 2 * 4 * D)  # w and c go down, Δ and c's change go up


@pytest.mark.parametrize("frozen", [1, 3])
@pytest.mark.parametrize("fields", [{}, dict(momentum=0.9), dict(momentum=0.9, clip=0.5, clip_mode="all")])
def test_steps_are_those_of_torch_over_the_trained_parameters(frozen, fields):
    module = probe().double().requires_grad_(True)
    module[frozen].requires_grad_(False)
    theirs, network = deepcopy(module), Network(module, torch.float64)
    chance = torch.Generator().manual_seed(0)
    draw = torch.randn(5, 20, 64, generator=chance, dtype=torch.float64)
    batches = [(x, torch.arange(20) % 10) for x in draw]
    start = network.weights.clone()
    local_train(network, start, LocalRule(0.1, 5, weight_decay=0.01, **fields), batches, F.cross_entropy)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    velocity = [torch.zeros_like(parameter) for parameter in trained]
    for x, y in batches:
        grads = torch.autograd.grad(F.cross_entropy(theirs(x), y), trained)
        grads = [g + 0.01 * p.detach() for g, p in zip(grads, trained, strict=True)]
        if "clip" in fields:
            norm = torch.cat([g.reshape(-1) for g in grads]).norm()
            grads = [g * min(1.0, 0.5 / float(norm + 1e-6)) for g in grads]
        for p, g, v in zip(trained, grads, velocity, strict=True):
            v.mul_(fields.get("momentum", 0.0)).add_(g)
            p.data.sub_(v, alpha=0.1)
    for (name, ours), expected in zip(module.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12, msg=name)


def test_the_perturbation_of_sam_has_the_radius_in_the_trained_weights_alone():
    network = Network(probe(), torch.float64)
    seen = []

    class Listening(type(parse("fedsam(0.5)").parts[0])):
        def plan(self, rule, sent, memory):
            rule = super().plan(rule, sent, memory)
            ascent = rule.ascent

            def look(slope, carry):
                def at(direction=None, length=None, **options):
                    if direction is not None:
                        seen.append(direction.clone() if length is None else direction * length)
                    return slope(direction, length, **options)

                at.weights = slope.weights
                return ascent(at, carry)

            return replace(rule, ascent=look)

    batch = torch.randn(20, 64, dtype=torch.float64), torch.arange(20) % 10
    rule = Listening(0.5).plan(LocalRule(0.1, 1), {"weights": network.weights.clone()}, {})
    local_train(network, network.weights.clone(), rule, [batch], F.cross_entropy)
    assert [e.numel() for e in seen] == [D]
    assert float(seen[0].norm()) == pytest.approx(0.5, rel=1e-6)


def test_flatness_is_that_of_the_trained_weights(small, featured):
    head = nn.Linear(8, 10)
    head.load_state_dict(probe()[3].state_dict())
    found = []
    for federation, module in (small, probe()), (featured, head):
        problem = Problem.of(federation, Network(module, torch.float64), parse("fedavg"), Local())
        found.append(measure(Portion(300).pooled(problem), k=2, products=6))
    ours, theirs = found
    assert ours.spectrum.eigenvalues == pytest.approx(theirs.spectrum.eigenvalues, rel=1e-6)
    assert ours.spectrum.trace.mean == pytest.approx(theirs.spectrum.trace.mean, rel=1e-8)
    for name in ("loss", "ascent_sharpness", "average_sharpness", "adaptive_sharpness", "weight_norm"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-8), name


@pytest.mark.parametrize("method", ["fedsam", "scaffold"])
def test_engines_agree_to_the_bit_and_groups_to_rounding(digits, method):
    settings = dict(rounds=2, cohort=8, workers=2, precision="float64")
    inline, pool = (train(digits, probe(), method, engine=name, **settings) for name in ("inline", "pool"))
    together = train(digits, probe(), method, engine="inline", group=4, **settings)
    assert torch.equal(together.model[1].weight, probe()[1].weight.double())
    for one, other, third in zip(*(run.model.parameters() for run in (inline, pool, together)), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, third, rtol=1e-9, atol=1e-11)


def test_fine_tuning_leaves_the_base_alone(digits):
    problem = Problem.of(digits, Network(probe()), parse("fedavg"), Local(weight_decay=0.1))
    before = problem.network.base_digest
    assert personalise(problem, problem.network.weights.clone(), epochs=(1,), size=40)
    assert problem.network.base_digest == before


@pytest.mark.parametrize(
    ("method", "frozen", "sentence"),
    [
        ("fedbabu", 1, "method: FrozenHead needs a body with trained weights, and the model trains its head alone"),
        (
            "fedbabu",
            3,
            "method: FrozenHead needs a head with trained weights of its own, and the model's head has none",
        ),
        ("fedsol(scope='head')", 3, 'method: scope = "head" needs a head with trained weights of its own'),
        ("fedsol(scope='body')", 1, 'method: scope = "body" needs a body with trained weights'),
    ],
)
@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_a_method_for_the_head_or_the_body_is_refused_where_it_is_frozen(digits, method, frozen, sentence, engine):
    module = probe().requires_grad_(True)
    module[frozen].requires_grad_(False)
    with pytest.raises(RecipeError) as refused:
        train(digits, module, method, rounds=1, cohort=3, engine=engine, workers=2)
    assert str(refused.value).startswith(sentence)


# --------------------------------------------------------------------------------------------------------------------
# On disk
# --------------------------------------------------------------------------------------------------------------------


def weights_of(folder):
    return {path.name: load_file(path) for path in sorted((folder / "checkpoints").glob("*.safetensors"))}


def test_a_run_keeps_the_whole_model_and_its_checkpoints_the_trained_part(digits, tmp_path):
    result = train(digits, probe(), "feddyn", rounds=2, cohort=3, engine="inline", out=tmp_path)
    plain = probe(seed=1)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), result.model.parameters(), strict=True))
    digest = Network(probe()).base_digest
    assert json.loads((tmp_path / "summary.json").read_text())["base_sha256"] == digest
    manifests = [*(tmp_path / "checkpoints").glob("*.json")]
    assert manifests and all(json.loads(path.read_text())["base"] == digest for path in manifests)
    sizes = {vector.numel() for file in weights_of(tmp_path).values() for vector in file.values()}
    assert sizes == {0, D, 5}  # there are no buffers; 5 are the median norms of the last rounds


def test_a_resumed_run_is_the_same_run(digits, tmp_path):
    settings = dict(method="scaffold", cohort=3, engine="inline", checkpoint_every=1)
    whole = train(digits, probe(), rounds=4, **settings)
    train(digits, probe(), rounds=2, out=tmp_path, **settings)
    resumed = train(digits, probe(), rounds=4, out=tmp_path, resume=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_a_run_is_not_resumed_on_another_base(digits, tmp_path):
    train(digits, probe(), rounds=1, cohort=3, engine="inline", out=tmp_path)
    bases = [Network(module).base_digest[:12] for module in (probe(), probe(seed=1))]
    sentence = (
        rf"00000001.json: was trained on the base {bases[0]}…, and this model has the base {bases[1]}…; "
        "give it the frozen weights that the run began with, or start a new run$"
    )
    with pytest.raises(RunError, match=sentence):
        train(digits, probe(seed=1), rounds=2, cohort=3, engine="inline", out=tmp_path, resume=True)
    free = probe().requires_grad_(True)
    with pytest.raises(RunError, match="this model has no frozen weights; "):
        train(digits, free, rounds=2, cohort=3, engine="inline", out=tmp_path, resume=True)


def without_base(path):
    """A manifest as it was written before there were bases."""
    from fedflat.runs.manifest import manifest_text

    manifest = json.loads(path.read_text())
    del manifest["sha256"], manifest["base"]
    path.write_bytes(manifest_text(manifest))


def test_checkpoints_from_before_there_were_bases_open(digits, tmp_path):
    settings = dict(model="mlp", cohort=3, engine="inline", checkpoint_every=1)
    whole = train(digits, rounds=3, **settings)
    train(digits, rounds=2, out=tmp_path, **settings)
    for path in (tmp_path / "checkpoints").glob("*.json"):
        without_base(path)
    resumed = train(digits, rounds=3, out=tmp_path, resume=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


MODEL = """
import torch
from torch import nn

SHIFT = 0.0

class Probe(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))
        self[1].requires_grad_(False)
        self[1].bias.data += SHIFT
"""


@pytest.fixture
def run_of_recipe(tmp_path, monkeypatch):
    """A finished run of a recipe whose model freezes its body; and the module that the model comes from."""
    (tmp_path / "frozen_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    trust("frozen_model")
    changes = ["model.name=frozen_model:Probe", "server.rounds=1", "engine.name=inline"]
    recipe = load(None, changes)
    recipe = recipe.model_copy(update={"model": type(recipe.model)(name="frozen_model:Probe")})
    execute(prepare(recipe), tmp_path / "run")
    import frozen_model

    return tmp_path / "run", frozen_model


def test_a_finished_run_is_read_measured_and_exported(run_of_recipe, tmp_path):
    run, _ = run_of_recipe
    (checkpoint,) = (run / "checkpoints").glob("*.json")
    models = [load_run(where).network for where in (run, checkpoint)]
    assert models[0].size == D and torch.equal(models[0].weights, models[1].weights)
    assert models[0].base_digest == models[1].base_digest
    export(run, tmp_path / "exported", onnx=False)
    plain = probe()
    plain.load_state_dict(load_file(tmp_path / "exported" / "model.safetensors"))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, models[0].module.state_dict()[name])


def test_a_checkpoint_is_not_read_on_another_base(run_of_recipe, monkeypatch):
    run, module = run_of_recipe
    (checkpoint,) = (run / "checkpoints").glob("*.json")
    monkeypatch.setattr(module, "SHIFT", 1.0)
    with pytest.raises(RunError, match=r"was trained on the base .*…, and this model has the base .*…; "):
        load_run(checkpoint)
    assert load_run(run).network.size == D  # model.safetensors brings the base along


def test_a_finished_run_is_not_read_as_a_model_that_trains_other_weights(run_of_recipe, monkeypatch):
    run, module = run_of_recipe

    class Whole(module.Probe):
        def __init__(self, shape, classes):
            super().__init__(shape, classes)
            self.requires_grad_(True)

    monkeypatch.setattr(module, "Probe", Whole)
    with pytest.raises(RunError, match=r"was trained on the base .*…, and this model has no frozen weights; "):
        load_run(run)


class Tied(nn.Module):
    """A layer that is used twice under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other, self.last = (
            nn.Linear(64, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 10),
        )
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.last(torch.relu(self.other(torch.relu(self.one(torch.relu(self.first(x.flatten(1))))))))


@pytest.mark.parametrize("frozen", [False, True])
def test_tied_parameters_are_sent_once_and_saved_under_every_name(digits, tmp_path, frozen):
    torch.manual_seed(0)
    module = Tied()
    module.one.weight.requires_grad_(not frozen)
    result = train(digits, module, "fedsam", rounds=1, cohort=3, engine="inline", out=tmp_path)
    assert result.history[0]["bytes_up"] == 3 * 4 * (64 * 8 + 8 + (not frozen) * 64 + 8 + 8 + 8 * 10 + 10)
    assert result.model.one.weight is result.model.other.weight
    assert torch.equal(result.model.one.weight, module.one.weight) == frozen
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["one.weight"], saved["other.weight"])
    plain = Tied()
    plain.load_state_dict(saved)
    assert torch.equal(plain.one.weight, result.model.one.weight)
