"""Low-rank adapters: what they compute, what they train, and that they are the weights W + s·BA."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.errors import RecipeError
from fedflat.flatness import layer_norms
from fedflat.local.rule import LocalRule
from fedflat.local.step import train
from fedflat.models import Layout, Network, adapters, build, factors, is_adapted, lora, merged
from fedflat.models.blocks import Convolution, FirstToken, ShiftedPatches, TransformerBlock, chain
from fedflat.models.corrected import summed


def vit():
    """A transformer with one block for images of 8 × 8."""
    layers = {"patches": ShiftedPatches(1, 4, 12), "block1": TransformerBlock(12, 2, 6, 10)}
    return chain(**layers, token=FirstToken(), head=nn.Linear(12, 3))


BODIES = {
    "linear": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "conv1d": lambda: (nn.Sequential(nn.Conv1d(2, 5, 3, stride=2), nn.Flatten(), nn.Linear(15, 3)), (2, 7)),
    "conv2d": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, dilation=2, padding_mode="circular"), nn.Flatten(), nn.Linear(64, 3)
        ),
        (2, 6, 6),
    ),
    "conv3d": lambda: (nn.Sequential(nn.Conv3d(1, 4, 2), nn.Flatten(), nn.Linear(32, 3)), (1, 3, 3, 3)),
    "convolution": lambda: (
        nn.Sequential(
            Convolution(8, 8, 3, padding=1), nn.Tanh(), Convolution(8, 4, 3, 2, 1), nn.Flatten(), nn.Linear(4, 3)
        ),
        (8, 2, 2),
    ),
    "transformer": lambda: (vit(), (1, 8, 8)),
}


@pytest.fixture(params=BODIES)
def body(request):
    """A network in float64 and a batch of its inputs."""
    torch.manual_seed(0)
    module, shape = BODIES[request.param]()
    return module.double().eval(), torch.randn(4, *shape, dtype=torch.float64)


def trained(module):
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def moved(module):
    """Give both factors of every adapter numbers other than those at the start."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return module


def test_at_the_start_the_function_is_unchanged_to_the_bit(body):
    module, x = body
    adapted = lora(module, 2, targets="all")
    assert is_adapted(adapted) and not is_adapted(module)
    assert torch.equal(adapted(x), module(x))


def test_merged_is_unmerged_to_rounding_and_has_the_modules_own_names(body):
    module, x = body
    adapted = moved(lora(module, 2, alpha=3.0, targets="all"))
    plain = merged(adapted)
    assert not is_adapted(plain) and plain.state_dict().keys() == module.state_dict().keys()
    assert [type(layer) for layer in plain.modules()] == [type(layer) for layer in module.modules()]
    assert len(trained(plain)) == len(list(module.parameters()))
    assert float((adapted(x) - module(x)).detach().abs().max()) > 0.1
    torch.testing.assert_close(plain(x), adapted(x), rtol=1e-12, atol=1e-12)


def test_the_correction_is_alpha_over_r_times_the_product():
    module = nn.Sequential(nn.Linear(6, 5)).double()
    adapted = moved(lora(module, 2, alpha=3.0, targets="all"))
    dense = module[0].weight + 3.0 / 2 * adapted[0].lora_b @ adapted[0].lora_a
    torch.testing.assert_close(merged(adapted)[0].weight, dense, rtol=1e-14, atol=1e-14)


def test_only_the_factors_are_trained_and_what_else_was_asked_for(body):
    module, _ = body
    adapted = lora(module, 2, targets="all", also="*.bias")
    assert trained(adapted) == [n for n, _ in adapted.named_parameters() if "lora_" in n or n.endswith(".bias")]
    assert all(parameter.requires_grad for parameter in module.parameters())  # the module itself is left alone
    head = [name for name, _ in module.named_parameters()][-2:]
    assert {*head} <= {*trained(lora(module, 2, targets="all", also="head"))}


def test_gradients_are_those_of_the_dense_correction(body):
    """∇_A = s Bᵀ ∇_W and ∇_B = s ∇_W Aᵀ, with ∇_W from the merged network."""
    module, x = body
    adapted = moved(lora(module, 2, alpha=3.0, targets="all"))
    plain, labels = merged(adapted), torch.arange(4) % 3
    F.cross_entropy(adapted(x), labels).backward()
    F.cross_entropy(plain(x), labels).backward()
    dense = dict(plain.named_parameters())
    for a, b in factors(Layout.of(adapted.named_parameters())):
        slope = dense[a.replace("lora_a", "weight")].grad.flatten(1)
        first, second = (adapted.get_parameter(name) for name in (a, b))
        torch.testing.assert_close(first.grad.flatten(1), 1.5 * second.flatten(1).T @ slope, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(second.grad.flatten(1), 1.5 * slope @ first.flatten(1).T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("frozen", ["", "lora_a", "lora_b"])
def test_many_rows_go_through_the_sum_with_the_derivatives_of_the_definition(frozen, monkeypatch):
    """Value, gradient and second derivative; few rows, a trained base and vmap take the definition."""
    torch.manual_seed(0)
    layer = moved(lora(nn.Sequential(nn.Linear(6, 5)), 2, targets="all"))[0].double()
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    x = torch.randn(4, 9, 6, dtype=torch.float64, requires_grad=True)
    sought = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def derivatives():
        y = layer(x)
        slopes = torch.autograd.grad(y.tanh().sum(), sought, create_graph=True)
        plain = torch.autograd.grad(layer(x).tanh().sum(), sought)
        curved = torch.autograd.grad(sum(slope.square().sum() for slope in slopes), sought)
        return [y, *slopes, *plain, *curved]

    seen = []
    monkeypatch.setattr(adapters, "summed", lambda *arguments: seen.append(1) or summed(*arguments))
    ours = derivatives()
    assert len(seen) == 2
    torch.func.vmap(layer)(x)
    layer(x[0, :1])
    assert len(seen) == 2
    layer.bias.requires_grad_(True)
    theirs = derivatives()
    assert len(seen) == 2
    for mine, definition in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, definition, rtol=1e-12, atol=1e-12)


def test_at_full_rank_the_first_step_is_that_of_full_training():
    """With r = inputs, an orthogonal A, B = 0 and α = r:  B ← −η ∇_W Aᵀ,  so  BA = −η ∇_W AᵀA = −η ∇_W.

    At B = 0 the gradient of A is 0, so A stays. This is one step of SGD on W itself. The next step differs: then A
    moves too, and the gradient of B is taken at the same point.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)).double()
    module[2].requires_grad_(False)
    adapted = lora(module, rank=6, alpha=6.0, targets="0")
    with torch.no_grad():
        adapted[0].lora_a.copy_(torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0])
    batch = torch.randn(10, 6, dtype=torch.float64), torch.arange(10) % 3
    for steps, same in (1, True), (2, False):
        full, low = (Network(copy.deepcopy(m), torch.float64) for m in (module, adapted))
        for network in full, low:
            train(network, network.weights.clone(), LocalRule(0.5, steps), [batch] * steps, F.cross_entropy)
        gap = float((merged(low.module)[0].weight - full.module[0].weight).detach().abs().max())
        assert (gap < 1e-14) == same
        assert gap < 0.1


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("attention", ["block1.attention.attention.qkv", "block1.attention.attention.out"]),
        ("head", ["head"]),
        ("qkv", ["block1.attention.attention.qkv"]),
        ("block*.mlp.fc?", ["block1.mlp.fc1", "block1.mlp.fc2"]),
        (["head", "patches.linear"], ["patches.linear", "head"]),
    ],
)
def test_targets_are_words_ends_of_names_and_patterns(targets, names):
    found = [name for name in trained(lora(vit(), 1, targets=targets)) if "lora_a" in name]
    assert [name.removesuffix(".lora_a") for name in found] == names


@pytest.mark.parametrize("name", ["fedavg-cnn", "vgg11", "resnet18-gn", "sl-vit", "gpt", "char-lstm"])
def test_all_layers_of_the_networks_of_the_catalogue_have_an_adapter(name):
    text = dict(vocabulary=9) if name in ("gpt", "char-lstm") else {}
    module = build(name, (8,) if text else (3, 32, 32), 10, **text)
    kinds = (nn.Linear, nn.Conv2d)
    layers = [name for name, layer in module.named_modules() if isinstance(layer, kinds)]
    adapted = [name for name in trained(lora(module, 1, targets="all")) if "lora_a" in name]
    assert layers == [name.removesuffix(".lora_a") for name in adapted]


def test_attention_is_known_by_its_class_too():
    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(4, 4)

    assert trained(lora(nn.Sequential(SelfAttention(), nn.Linear(4, 2)), 1)) == ["0.query.lora_a", "0.query.lora_b"]


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [
        (nn.Linear(4, 2), {"targets": "attention"}, "lora: targets = 'attention' matches no layer; take \"all\", "),
        (
            nn.Sequential(nn.Linear(4, 2)),
            {"targets": ["0", "q"]},
            "lora: targets = 'q' matches no layer; .* layers: 0$",
        ),
        (nn.Sequential(nn.Linear(4, 2)), {"targets": []}, "lora: there are no targets; "),
        (nn.Conv2d(4, 4, 1, groups=2), {"targets": "all"}, "of the layers: none that is an nn.Linear or an ungrouped"),
        (nn.MultiheadAttention(4, 2), {"targets": "all"}, "of the layers: none"),
        (nn.Sequential(nn.Linear(4, 2)), {"targets": "0", "rank": 3}, "rank = 3, but 0 has 4 inputs and 2 outputs"),
        (
            nn.Sequential(nn.Linear(4, 2)),
            {"targets": "0", "rank": 1, "also": "x"},
            "also = 'x' matches no layer and no",
        ),
        *(
            (nn.Sequential(nn.Linear(4, 2)), {"targets": "0", **wrong}, sentence)
            for wrong, sentence in [
                ({"rank": 1.5}, "rank = 1.5, where an integer"),
                ({"rank": True}, "rank = True, where an integer"),
                ({"alpha": float("nan")}, "alpha = nan, where a finite number above 0"),
                ({"alpha": 0}, "alpha = 0, where"),
                ({"alpha": "x"}, "alpha = 'x', where"),
                ({"targets": 5}, "targets = 5, where a name"),
                ({"also": [5]}, r"also = \[5\], where a name"),
            ]
        ),
        (lora(nn.Linear(4, 2), 1, targets="all"), {"targets": "all"}, "the module has adapters already; `merged"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_sentence(module, options, sentence):
    with pytest.raises(RecipeError, match=sentence):
        lora(module, **{"rank": 1, **options})


def test_a_tied_weight_is_merged_for_its_own_layer_alone():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    module[1].weight = module[0].weight
    adapted = moved(lora(module, 1, targets="1"))
    plain, x = merged(adapted), torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(plain[0].weight, module[0].weight)
    torch.testing.assert_close(plain(x), adapted(x), rtol=1e-12, atol=1e-12)


def test_the_same_generator_draws_the_same_factors():
    module = nn.Sequential(nn.Linear(6, 5))
    one, other = (lora(module, 2, targets="all", generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one[0].lora_a, other[0].lora_a)


def test_an_adapted_network_can_be_sent_to_another_process():
    adapted = moved(lora(nn.Sequential(nn.Linear(6, 5)), 2, targets="all"))
    copied = pickle.loads(pickle.dumps(Network(adapted)))
    assert torch.equal(copied.module(torch.ones(1, 6)), adapted(torch.ones(1, 6)))


def test_the_norms_of_a_layer_are_those_of_the_weight_it_computes_with():
    adapted = moved(lora(nn.Sequential(nn.Linear(6, 5)).double(), 2, targets="all"))
    (found,) = layer_norms(adapted, torch.ones(1, 6, dtype=torch.float64))
    assert found.frobenius == pytest.approx(float(merged(adapted)[0].weight.detach().norm()), rel=1e-12)


def test_the_adapted_head_is_still_the_head():
    network = Network(lora(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), 2, targets="all"))
    network.choose_head(torch.ones(1, 6))
    assert network.head == slice(2 * 6 + 5 * 2, network.size)


@pytest.mark.parametrize("also", ["last", "head", "first.weight", "last.weight"])
def test_a_tied_weight_is_trained_in_full_by_each_of_its_names(also):
    layers = {"first": nn.Embedding(5, 4), "middle": nn.Linear(4, 4), "last": nn.Linear(4, 5, bias=False)}
    module = nn.ModuleDict(layers)
    module["last"].weight = module["first"].weight
    adapted = lora(module, 1, targets="middle", also=also)
    assert trained(adapted) == ["first.weight", "middle.lora_a", "middle.lora_b"]
    assert adapted["last"].weight is adapted["first"].weight


def test_a_module_that_is_one_layer_may_be_trained_in_full_too():
    assert trained(lora(nn.Linear(4, 2), 1, targets="all", also="all")) == ["weight", "bias", "lora_a", "lora_b"]
