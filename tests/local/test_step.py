"""The local step against the formula written out by hand."""

import weakref
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fedflat.errors import RecipeError
from fedflat.local.kernels import choose
from fedflat.local.kernels.linear import Chain
from fedflat.local.rule import LocalRule
from fedflat.local.slope import Slope
from fedflat.local.step import corrected, step, train
from fedflat.local.watcher import Watcher
from fedflat.methods.chain import Method
from fedflat.methods.part import Part
from fedflat.methods.parts import ActivationNorm, Ascent, Distillation, LookbackAscent, Proximal, ProximalAscent
from fedflat.models.vector import Network
from fedflat.randomness import generator

D = 5


def vectors(*seeds):
    return [torch.randn(D, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]


def clip(x, limit):
    return x * min(1.0, limit / (float(x.norm()) + 1e-6))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("loss_only", lambda g, p, w, c, k: clip(2 * g, c) + p + k * w),
        ("official", lambda g, p, w, c, k: clip(2 * g + p, c) + k * w),
        ("all", lambda g, p, w, c, k: clip(2 * g + p + k * w, c)),
    ],
)
def test_the_clip_goes_around_what_its_mode_says(mode, expected):
    w, g, pull = vectors(0, 1, 2)
    rule = LocalRule(0.1, 1, weight_decay=0.01, clip=0.5, clip_mode=mode, scale=2.0, pull=pull, decay=0.3)
    after = w.clone()
    step(after, g.clone(), None, rule)
    torch.testing.assert_close(after, w - 0.1 * expected(g, pull, w, 0.5, 0.31))


@pytest.mark.parametrize("mode", ["loss_only", "official", "all"])
def test_the_rows_of_a_matrix_are_clipped_one_by_one(mode):
    rows = torch.stack(vectors(0, 1, 2)) * torch.tensor([[1.0], [5.0], [0.01]])
    rule = LocalRule(0.1, 1, clip=0.5, clip_mode=mode)
    g, _ = corrected(torch.zeros_like(rows), rows, rule)
    torch.testing.assert_close(g, torch.stack([clip(row, 0.5) for row in rows]))


def test_pulls_decays_and_springs_of_several_parts_add_up():
    one, two = vectors(0, 1)
    rule = LocalRule(0.1, 1).with_pull(one, 0.1, 0.2).with_pull(two, 0.4, 0.8)
    torch.testing.assert_close(rule.pull, one + two)
    assert (rule.decay, rule.spring) == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize("count", [0, 2])
def test_an_optimiser_gets_the_decay_of_the_parts_and_that_of_the_recipe_is_decoupled(count):
    w, g = vectors(0, 1)
    frozen = torch.arange(D) < count

    class Plain:
        def __call__(self, gradient, weights, memory, layout, k):
            return gradient, {"seen": gradient, **memory}

    rule = LocalRule(0.1, 1, weight_decay=0.2, decay=0.3, frozen=frozen if count else None, descent=Plain())
    after = w.clone()
    memory = step(after, g.clone(), None, rule)
    torch.testing.assert_close(memory["seen"], (g + 0.3 * w) * ~frozen)
    torch.testing.assert_close(after, torch.where(frozen, w, w - 0.1 * 0.2 * w - 0.1 * (g + 0.3 * w)))


def test_a_part_that_needs_the_head_finds_out_what_is_trained():
    def asks(head, body=False):
        LocalRule(0.1, 1, layout=Network(nn.Linear(4, 2)).layout, head=head).require_head("fedsol", body)

    for head in (slice(0), slice(3, 3)):
        with pytest.raises(RecipeError, match="fedsol needs a head with trained weights of its own"):
            asks(head)
    for head in (slice(None, 3), slice(0, 10)):
        asks(head)
    asks(slice(2, 10), body=True)
    with pytest.raises(RecipeError, match="fedsol needs a body with trained weights"):
        asks(slice(0, 10), body=True)


def test_a_part_draws_by_seed_purpose_round_and_client():
    rule = LocalRule(0.1, 1, seed=3, round=4, client=5, stream="#2")
    expected = torch.rand(3, generator=generator(3, "part/mask#2", 4, 5))
    assert torch.equal(torch.rand(3, generator=rule.generator("mask")), expected)


@pytest.mark.parametrize("kind", ["classes", "numbers", "tokens"])
def test_a_term_compares_with_another_model_on_the_positions_that_count(kind):
    network = Network(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.float64)
    x = torch.randn(2, 5, 4, dtype=torch.float64) if kind == "tokens" else torch.randn(6, 4, dtype=torch.float64)
    counted = torch.tensor([[True, True, False, True, False], [True, True, True, False, False]])
    labels = {
        "classes": torch.arange(6) % 3,
        "numbers": torch.randn(6, 3, dtype=torch.float64),
        "tokens": torch.where(counted, 1, -100),
    }[kind]
    seen = []
    with network.listening(features=True) as tap:
        slope = Slope(network, LocalRule(0.1, 1), lambda z, _: z.sum(), tap).at((x, labels))
        slope(terms=(lambda here: seen.append((here, here.under(slope.weights))) or here.logits.sum(),))
    here, other = seen[0]
    kept = counted if kind == "tokens" else slice(None)
    torch.testing.assert_close(other.logits, network.module(x)[kept])
    torch.testing.assert_close(other.features, network.module[:2](x)[kept])
    torch.testing.assert_close(here.logits, other.logits)
    with network.listening() as tap:
        blind = Slope(network, LocalRule(0.1, 1), lambda z, _: z.sum(), tap).at((x, labels))
        blind(terms=(lambda here: seen.append(here.forward) or here.logits.sum(),))
    assert seen[1].features is None


def test_a_watched_term_is_reported_and_changes_no_step():
    network, x, y = problem()
    start, plain = network.weights.clone(), LocalRule(0.1, 2)
    watching = ActivationNorm(0.0).plan(plain, {"weights": start}, {})
    seen, unseen = (train(network, start, rule, [(x, y)] * 2, F.cross_entropy) for rule in (watching, plain))
    assert torch.equal(seen.delta, unseen.delta)
    assert not unseen.notes
    assert [name.partition("/")[0] for name in seen.notes] == ["activation"]
    assert all(value > 0 for value in seen.notes.values())


def test_a_watched_term_may_take_gradients_without_a_trace_in_terms_that_have_state():
    class Counting:
        passes = 0

        def __call__(self, here):
            self.passes += 1
            return 0 * here.logits.sum()

    network, x, y = problem()
    term = Counting()
    rule = LocalRule(0.1, 1).with_term(term).watching(lambda here: here.slope().sum())
    Watcher(network, rule, F.cross_entropy).look((x, y))
    assert term.passes == 0


def test_a_look_at_a_watched_term_leaves_the_statistics_of_batch_norm_alone():
    network = Network(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), torch.float64)
    rule = ActivationNorm(0.0).plan(LocalRule(0.1, 1), {"weights": network.weights}, {})
    before = [buffer.clone() for buffer in network.module.buffers()]
    network.module.train()
    Watcher(network, rule, F.cross_entropy).look((torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3))
    assert all(map(torch.equal, network.module.buffers(), before))


def test_a_blank_rule_has_the_facts_and_none_of_the_ingredients():
    facts = LocalRule(0.1, 3, momentum=0.9, clip=1.0, share=1.5, seed=4, head=slice(1, 2))
    rule = facts.with_pull(vectors(0)[0], 0.1, 0.2).with_term(lambda here: here.loss).with_ascent(Ascent(), s=None)
    rule = replace(rule, scale=0.5, lr_floor=0.5, pairs=True, buffered=2)
    assert vars(rule.blank()) == vars(facts)


@pytest.mark.parametrize(
    ("fields", "direct", "plain"),
    [
        (dict(), True, True),
        (dict(weight_decay=0.1, decay=0.1, lr_floor=0.5), True, True),
        (dict(momentum=0.9), True, False),
        (dict(terms=(lambda here: here.loss,)), True, False),
        (dict(clip=1.0), False, False),
        (dict(scale=0.5), False, False),
        (dict(spring=0.5), False, False),
        (dict(pull=torch.zeros(D)), False, False),
        (dict(ascent=Ascent(0.1)), False, False),
        (dict(frozen=torch.zeros(D, dtype=torch.bool)), False, False),
        (dict(pairs=True), False, False),
    ],
)
def test_a_step_is_direct_or_plain_only_if_nothing_else_is_done(fields, direct, plain):
    rule = LocalRule(0.1, 1, **fields)
    assert (rule.direct, rule.plain) == (direct, plain)


def test_momentum_is_that_of_torch():
    w, g1, g2 = vectors(0, 1, 2)
    theirs = w.clone().requires_grad_()
    optimiser = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01)
    velocity, rule = torch.zeros_like(w), LocalRule(0.1, 2, momentum=0.9, weight_decay=0.01)
    for g in (g1, g2):
        theirs.grad = g.clone()
        optimiser.step()
        step(w, g.clone(), velocity, rule)
    torch.testing.assert_close(w, theirs.detach())


def problem(seed=0):
    torch.manual_seed(seed)
    network = Network(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.float64)
    return network, torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))


@torch.no_grad()
def forward(network, weights, x):
    """The logits of a network at other weights."""
    return functional_call(network.module, network.layout.views(weights), (x,))


def test_weights_are_restored_to_the_bit_after_a_look_elsewhere():
    network, x, y = problem()
    before = network.weights.clone()
    with network.listening() as tap:
        slope = Slope(network, LocalRule(0.1, 1), nn.functional.cross_entropy, tap).at((x, y))
        slope(torch.full_like(before, 1e-3) * torch.pi)
    assert torch.equal(network.weights, before)


@pytest.mark.parametrize("length", [None, torch.tensor([0.3], dtype=torch.float64)])
def test_a_spent_direction_becomes_the_point_of_the_gradient_which_is_the_same_to_the_bit(length):
    network, x, y = problem()
    before, way = network.weights.clone(), torch.randn(network.size, dtype=torch.float64)
    point = before + way if length is None else torch.addcmul(before, way, length)
    with network.listening() as tap:
        slope = Slope(network, LocalRule(0.1, 1), nn.functional.cross_entropy, tap).at((x, y))
        direction = way.clone()
        gradient = slope(direction, length)
        assert torch.equal(direction, way)
        assert torch.equal(slope(direction, length, spent=True), gradient)
    assert torch.equal(direction, point) and torch.equal(network.weights, before)


def test_a_step_holds_no_gradient_of_the_step_before_and_the_last_leaves_the_momentum_to_the_move():
    momenta, gradients = [], []

    def ascent(slope, carry):
        assert not [old for old in gradients if old() is not None]
        momenta.append(slope.velocity.data_ptr())
        gradient = slope()
        gradients.append(weakref.ref(gradient))
        return gradient, carry

    network, x, y = problem()
    rule = LocalRule(0.1, 3, momentum=0.9).with_ascent(ascent)
    outcome = train(network, network.weights.clone(), rule, [(x, y)] * 3, F.cross_entropy)
    assert len(gradients) == 3 and {*momenta} == {outcome.delta.data_ptr()}


@pytest.mark.parametrize("view", [False, True])
def test_a_momentum_that_an_ascent_has_carried_on_is_in_the_outcome(view):
    """Δ takes its place otherwise, and a client that keeps its momentum would keep Δ."""

    def carrying(slope, carry):
        return slope(), {"momentum": slope.velocity[:] if view else slope.velocity, "number": 1}

    network, x, y = problem()
    start = network.weights.clone()
    outcome = train(network, start, LocalRule(0.1, 1, momentum=0.9).with_ascent(carrying), [(x, y)], F.cross_entropy)
    torch.testing.assert_close(outcome.delta, network.weights - start)
    torch.testing.assert_close(outcome.carry["momentum"], -outcome.delta / 0.1)


def test_sam_steps_along_the_gradient_at_the_top_of_the_ball():
    network, x, y = problem()
    start = network.weights.clone()
    outcome = train(network, start, Ascent(0.05).plan(LocalRule(0.1, 1), {}, {}), [(x, y)], nn.functional.cross_entropy)

    def gradient(at):
        network.bind(at.clone())
        return network.differentiate(nn.functional.cross_entropy(network.module(x), y)).clone()

    g = gradient(start)
    expected = -0.1 * gradient(start + 0.05 * g / g.norm())
    torch.testing.assert_close(outcome.delta, expected, rtol=1e-6, atol=1e-12)


def test_man_has_the_gradient_of_finite_differences():
    network, x, y = problem()
    start = network.weights.clone()
    rule = ActivationNorm(0.7).plan(LocalRule(1.0, 1), {}, {})
    outcome = train(network, start, rule, [(x, y)], nn.functional.cross_entropy)

    @torch.no_grad()
    def objective(at):
        network.bind(at)
        hidden = network.module[1](network.module[0](x))
        return float(nn.functional.cross_entropy(network.module[2](hidden), y) + 0.35 * hidden.square().mean())

    h = 1e-6
    for i in range(0, network.size, 7):
        unit = torch.zeros_like(start)
        unit[i] = h
        slope = (objective(start + unit) - objective(start - unit)) / (2 * h)
        assert -float(outcome.delta[i]) == pytest.approx(slope, abs=1e-7)


def test_man_reports_the_norms_it_penalises():
    network, x, y = problem()
    expected = float(network.module[1](network.module[0](x)).square().mean().detach())
    rule = ActivationNorm(0.1).plan(LocalRule(0.1, 1), {}, {})
    outcome = train(network, network.weights.clone(), rule, [(x, y)], nn.functional.cross_entropy)
    assert outcome.notes == {"activation/1": pytest.approx(expected)}


def test_batch_statistics_come_from_the_unperturbed_pass_only():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    network = Network(module)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    after = {}
    for rho in (0.0, 5.0):
        network.buffers.copy_(torch.cat([torch.zeros(6), torch.ones(6)]))
        start = network.weights.clone()
        train(network, start, Ascent(rho).plan(LocalRule(0.1, 1), {}, {}), [(x, y)], nn.functional.cross_entropy)
        network.weights.copy_(start)
        after[rho] = network.buffers.clone()
    assert torch.equal(after[0.0], after[5.0])
    assert not torch.equal(after[0.0][:6], torch.zeros(6))


@pytest.mark.parametrize(("scope", "body_passes"), [("head", 1), ("all", 2), ("body", 2)])
def test_fedsol_on_the_head_runs_the_body_once_and_the_frozen_model_once(scope, body_passes):
    network, x, y = problem()
    start = network.weights.clone()
    counts = {"body": 0, "head": 0, "frozen": 0}

    def counting(name):
        def count(module, *_):
            counts[name if module.training else "frozen"] += 1

        return count

    network.module[0].register_forward_hook(counting("body"))
    network.module[2].register_forward_hook(counting("head"))
    method = Method(ProximalAscent(Distillation(3.0), rho=0.5, scope=scope))
    rule = replace(LocalRule(0.1, 1), layout=network.layout, head=network.head)
    rule = method.plan(rule, {"weights": start + 0.01}, {})
    train(network, start, rule, [(x, y)], nn.functional.cross_entropy)
    assert counts == {"body": body_passes, "head": 2, "frozen": 2}  # the frozen model's body and head, once each


@pytest.mark.parametrize("scope", ["head", "all"])
@pytest.mark.parametrize("source", [Distillation(3.0), Proximal(0.5)])
def test_loss_and_terms_are_noted_at_w_also_where_the_gradient_is_taken_elsewhere(scope, source):
    network, x, y = problem()
    start = network.weights.clone()

    def term(here):
        here.note("size", here.logits.norm())
        return 0.1 * here.logits.square().mean()

    rule = LocalRule(0.1, 1, layout=network.layout, head=network.head).with_term(term)
    rule = Method(ProximalAscent(source, 5.0, "fixed", scope)).plan(rule, {"weights": start + 0.1}, {})
    outcome = train(network, start, rule, [(x, y)], F.cross_entropy)
    logits = forward(network, start, x)
    assert outcome.notes == {"size": pytest.approx(float(logits.norm()))}
    assert outcome.loss == pytest.approx(float(F.cross_entropy(logits, y)))


def test_a_step_notes_its_terms_once_however_often_it_looks_at_w():
    network, x, y = problem()
    noted = []

    def term(here):
        noted.append(here.at_w)
        return here.logits.mean()

    def twice(slope, carry):
        slope(torch.ones_like(slope.weights))
        return slope() + slope(), carry

    rule = LocalRule(0.1, 2).with_term(term).with_ascent(twice)
    train(network, network.weights.clone(), rule, [(x, y)] * 2, F.cross_entropy)
    assert noted == [False, True, False] * 2


def test_a_network_trains_in_training_mode():
    network, x, y = problem()
    network.module.eval()
    train(network, network.weights.clone(), LocalRule(0.1, 1), [(x, y)], F.cross_entropy)
    assert network.module.training


@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_a_plain_step_of_a_chain_is_the_step_of_its_gradient(decay):
    """w ← w − η (∇ + decay · w), whether ∇ is written down or not."""
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.float64)
    start = network.weights.clone()
    batches = [(torch.randn(4, 5, dtype=torch.float64), torch.randint(0, 3, (4,))) for _ in range(3)]
    rule = LocalRule(lr=0.2, steps=3, weight_decay=decay, decay=3 * decay, lr_floor=0.5)
    at_once = train(network, start, rule, batches, F.cross_entropy)
    clipped = train(network, start, replace(rule, clip=1e9), batches, F.cross_entropy)
    assert rule.plain and not clipped.rule.plain
    torch.testing.assert_close(at_once.delta, clipped.delta, rtol=1e-12, atol=1e-14)
    assert at_once.loss == pytest.approx(clipped.loss, rel=1e-12)


@pytest.mark.parametrize("part", [Part(), ActivationNorm(0.1)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_nothing_is_done_to_needs_no_vector_of_the_gradient(part, momentum):
    def after(**also):
        torch.manual_seed(0)
        network = Network(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)))
        rule = part.plan(LocalRule(lr=0.1, steps=3, momentum=momentum, weight_decay=0.01, **also), {}, {})
        batches = [(torch.randn(5, 1, 4, 4), torch.randint(4, (5,))) for _ in range(3)]
        gathered, differentiate = [], network.differentiate
        network.differentiate = lambda objective: gathered.append(True) or differentiate(objective)
        outcome = train(network, network.weights.clone(), rule, batches, F.cross_entropy)
        return outcome.delta, bool(gathered)

    straight, gathered = after(), after(pull=torch.zeros(3 * 9 + 3 + 12 * 4 + 4))
    torch.testing.assert_close(straight[0], gathered[0], rtol=1e-6, atol=1e-7)
    assert (straight[1], gathered[1]) == (False, True)


@pytest.fixture
def calls(monkeypatch):
    """How often each of the kernels that make gradients was called."""
    counts = Counter()

    def count(owner, name):
        kernel = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: counts.update([name]) or kernel(*args))

    for name in ("gradient", "descend"):
        count(Chain, name)
    for name in ("partials", "differentiate"):
        count(Network, name)
    return counts


CHAIN = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
OTHER = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("module", "part", "facts", "expected"),
    [
        (CHAIN, Part(), {}, {"descend": 3}),
        (CHAIN, Part(), dict(weight_decay=0.1), {"descend": 3}),
        (CHAIN, Part(), dict(momentum=0.9), {"gradient": 3}),
        (CHAIN, Part(), dict(clip=1.0), {"gradient": 3}),
        (CHAIN, Proximal(0.1), {}, {"gradient": 3}),
        (CHAIN, Ascent(0.1), {}, {"gradient": 6}),
        (CHAIN, ActivationNorm(0.1), dict(momentum=0.9), {"partials": 3}),
        (CHAIN, ActivationNorm(0.1), dict(clip=1.0), {"differentiate": 3}),
        (OTHER, Part(), dict(momentum=0.9), {"partials": 3}),
        (OTHER, Part(), dict(clip=1.0), {"differentiate": 3}),
        (OTHER, Ascent(0.1), {}, {"differentiate": 6}),
    ],
)
def test_every_step_uses_the_cheapest_kernel_that_can_make_it(calls, module, part, facts, expected):
    network = Network(deepcopy(module))
    rule = part.plan(LocalRule(0.1, 3, **facts), {"weights": network.weights.clone()}, {})
    batch = torch.randn(6, 4), torch.arange(6) % 3
    train(network, network.weights.clone(), rule, [batch] * 3, F.cross_entropy)
    assert calls == expected


@pytest.mark.parametrize("labels", ["soft", "classes"])
def test_the_chain_is_for_the_cross_entropy_of_classes_only(calls, labels):
    network = Network(deepcopy(CHAIN))
    y = torch.arange(6) % 3
    batch = torch.randn(6, 4), F.one_hot(y, 3).float() if labels == "soft" else y
    loss = F.cross_entropy if labels == "soft" else lambda z, y: F.cross_entropy(z, y)
    rules = LocalRule(0.1, 1), LocalRule(0.1, 1, clip=1.0)
    for rule in rules:
        train(network, network.weights.clone(), rule, [batch], loss)
    assert calls == {"partials": 1, "differentiate": 1}


@pytest.mark.parametrize("module", [CHAIN, OTHER])
def test_an_ascent_may_ask_for_other_terms_with_and_without_the_loss(module):
    network = Network(deepcopy(module), torch.float64)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    loss, term = (network.differentiate(f(network.module(x))) for f in (lambda z: F.cross_entropy(z, y), torch.var))
    with network.listening() as tap:
        slope = Slope(network, LocalRule(0.1, 1), F.cross_entropy, tap).at((x, y))
        slope.kernels = choose(network, Ascent(0.1).plan(LocalRule(0.1, 1), {}, {}), F.cross_entropy, y)
        terms = (lambda here: here.logits.var(),)
        torch.testing.assert_close(slope(), loss)
        torch.testing.assert_close(slope(terms=terms), loss + term)
        torch.testing.assert_close(slope(terms=terms, data=False), term)


def test_a_method_that_takes_no_gradient_at_w_looks_there_in_every_eighth_step():
    network, x, y = problem()
    start, losses = network.weights.clone(), []

    def loss(logits, labels):
        value = F.cross_entropy(logits, labels)
        losses.append(float(value.detach()))
        return value

    rule = LookbackAscent(0.5).plan(LocalRule(0.1, 10), {"weights": start}, {"seen": start + 1})
    outcome = train(network, start, rule, [(x, y)] * 10, loss)
    assert len(losses) == 12  # ten gradients elsewhere, and after the first and the ninth of them a look at w
    assert losses[1] == pytest.approx(float(F.cross_entropy(forward(network, start, x), y)))
    assert outcome.loss == pytest.approx((losses[1] + losses[10]) / 2)


def test_a_parameter_that_the_loss_does_not_use_decays_all_the_same():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle, self.head = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(x)

    network = Network(Idle())
    rule = LocalRule(lr=0.5, steps=1, momentum=0.9, weight_decay=0.2)
    outcome = train(network, network.weights.clone(), rule, [(torch.ones(1, 2), torch.tensor([0]))], F.cross_entropy)
    assert outcome.delta[0] == pytest.approx(-0.1)


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.body = reentrant, nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, self.words(x).mean(1), use_reentrant=self.reentrant))


@pytest.mark.parametrize("module", [Words, Recomputed])
@pytest.mark.parametrize("clip", [None, 1e9])
def test_sparse_gradients_and_recomputed_activations_train_like_others(module, clip):
    def after(special):
        torch.manual_seed(0)
        network = Network(module(special))
        batch = torch.randint(20, (6, 5)), torch.arange(6) % 3
        rule = LocalRule(lr=0.1, steps=2, momentum=0.9, clip=clip)
        return train(network, network.weights.clone(), rule, [batch, batch], F.cross_entropy).delta

    assert torch.equal(after(True), after(False))
    assert after(True).abs().max() > 0


class Casts(TorchDispatchMode):
    """Counts the tensors of one shape that are cast, by their new type."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.found = shape, Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        if operator is torch.ops.aten._to_copy.default and result.shape == self.shape:
            self.found[result.dtype] += arguments[0].dtype != result.dtype
        return result


@pytest.mark.parametrize(("part", "passes"), [(Part(), 1), (Ascent(0.05), 2)])
def test_in_bf16_a_weight_is_cast_once_for_each_point_and_its_gradient_once_for_each_pass(part, passes):
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    network = Network(module, autocast=True)
    x, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    rule = part.plan(LocalRule(0.1, 3, momentum=0.9), {}, {})
    with Casts(module[0].weight.shape) as casts:
        train(network, network.weights.clone(), rule, [(x, y)] * 3, F.cross_entropy)
    assert casts.found == {torch.bfloat16: 3 * passes, torch.float32: 3 * passes}
