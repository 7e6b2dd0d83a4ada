"""What a part must keep to is checked when a method is made, and a mistake is one sentence that names the part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedflat import Method, Part, option, train, trusted
from fedflat.errors import RecipeError
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.example import drawn, example_rule
from fedflat.methods.parser import parse
from fedflat.methods.part import ServerView, Wrapper
from fedflat.methods.parts import ActivationNorm, ConsensusAscent, DynamicDual, LocalPrivacy, ProximalAscent
from fedflat.methods.uploads import Upload, collect
from fedflat.models import Layout


def part(name: str = "Mine", **members: Any) -> Part:
    """A part with these functions, which are called without `self`, and these declarations."""
    wrapped = {key: staticmethod(f) if callable(f) else f for key, f in members.items()}
    made: Part = dataclass(frozen=True)(type(name, (Part,), wrapped))()
    return made


def halved(delta: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(len(delta)) % 2 == 0, delta, 0.0)


def test_all_methods_of_the_catalogue_keep_to_it():
    for entry in CATALOGUE.values():
        entry.build()


@pytest.mark.parametrize("order", [0, 1])
def test_a_part_that_uploads_the_raw_update_after_another_has_changed_it_is_refused(order):
    thin = part("Thins", report=lambda u, s, m, o: (u.update(delta=halved(u.delta)), m))
    loud = part("Doubles", report=lambda u, s, m, o: (u.update(delta=2 * o.delta), m))
    if order:
        with pytest.raises(RecipeError, match="Doubles drops the Δ that Thins has made"):
            Method(thin, loud)
    else:
        assert [type(p).__name__ for p in Method(loud, thin).parts] == ["Doubles", "Thins"]
    assert isinstance(Method(LocalPrivacy(), loud).parts[-1], LocalPrivacy)


WRITING = {
    "first_state": lambda w: (w.zero_(), {})[1],
    "first_memory": lambda w: (w.zero_(), {})[1],
    "broadcast": lambda server: (server.weights.zero_(), {})[1],
    "plan": lambda rule, sent, memory: (sent["weights"].zero_(), rule)[1],
    "report": lambda upload, sent, memory, outcome: (upload, (upload.delta.zero_(), memory)[1]),
    "merge": lambda move, server, uploads: (move.mul_(0.5), {}),
    "evaluated": lambda server: (server.weights.zero_(), None)[1],
}


@pytest.mark.parametrize("function", WRITING)
def test_a_part_that_writes_to_what_it_is_given_is_refused(function):
    with pytest.raises(RecipeError, match="Mine writes to a tensor that it was given"):
        Method(part(**{function: WRITING[function]}))


def hidden_write(upload, sent, memory, outcome):
    memory["mine"].data.add_(1.0)
    return upload, memory


def added_to_carry(slope, carry):
    carry["mine"].add_(slope())
    return slope(), carry


class Adding:
    """An optimiser that begins with what it is given, and adds to it in place."""

    def __init__(self, first):
        self.first = first

    def start(self, weights):
        return {"mine": self.first}

    def __call__(self, g, weights, memory, layout, k):
        return memory["mine"].add_(g), memory


@pytest.mark.parametrize(
    "members",
    [
        dict(report=hidden_write),
        dict(merge=lambda move, *_: (move.numpy().fill(0.0), (move, {}))[1]),
        dict(plan=lambda rule, sent, memory: rule.with_ascent(added_to_carry, mine=memory["mine"])),
        dict(plan=lambda rule, sent, memory: rule.with_descent(Adding(memory["mine"]))),
        dict(plan=lambda rule, sent, memory: rule.with_descent(Adding(sent["weights"]))),
    ],
    ids=["data", "numpy", "carry", "optimiser", "optimiser-weights"],
)
def test_a_write_that_leaves_no_version_or_comes_in_a_step_is_refused(members):
    with pytest.raises(RecipeError, match="Mine writes to a tensor that it was given"):
        Method(part(first_memory=zeros, **members))


def test_a_part_may_keep_nan_and_an_optimiser_may_write_to_what_it_has_made():
    Method(part(first_state=lambda w: {"mine": torch.full_like(w, torch.nan)}))
    fresh = Adding(torch.zeros(43))
    Method(part(plan=lambda rule, *_: rule.with_descent(fresh)))


def test_a_part_that_writes_to_the_average_or_to_anothers_pull_is_refused():
    with pytest.raises(RecipeError, match="Mine writes to"):
        Method(part(merge=lambda move, server, uploads: (uploads.average("delta").zero_(), (move, {}))[1]))
    silencing = part(plan=lambda rule, *_: (None if rule.pull is None else rule.pull.zero_(), rule)[1])
    Method(silencing)
    with pytest.raises(RecipeError, match="Mine writes to"):
        Method(DynamicDual(), silencing)


def test_a_part_that_empties_anothers_carry_is_refused():
    with pytest.raises(RecipeError, match="Mine drops the carry that ConsensusAscent has set"):
        Method(ConsensusAscent(), part(plan=lambda rule, *_: (rule.carry.clear(), rule)[1]))


def test_a_part_may_fill_the_table_of_its_own_memory():
    def keep(upload, sent, memory, outcome):
        memory["sum"] = memory["sum"] + outcome.delta
        return upload, memory

    assert Method(part(first_memory=lambda w: {"sum": torch.zeros_like(w)}, report=keep)).memory == ("sum",)


def writing_ascent(slope, carry):
    g = slope()
    slope.weights.sub_(g)
    return g, carry


class Optimiser:
    """An optimiser whose `start` and call are what a test wants."""

    def __init__(self, call, start=lambda weights: {}):
        self.call, self.start = call, start

    def __call__(self, g, weights, memory, layout, k):
        return self.call(g, weights, memory)


STEPS: list[tuple[Any, str]] = [
    (dict(ascent=writing_ascent), "its ascent writes to the client's weights"),
    (dict(ascent=lambda slope, carry: slope()), "Tensor|a tensor of shape"),
    (
        dict(ascent=lambda slope, carry: (slope()[:3], carry)),
        r"a tensor of shape \(3,\) \(float32\) is returned where a vector",
    ),
    (dict(ascent=lambda slope, carry: (slope(), None)), "NoneType is returned where a table"),
    (dict(ascent=lambda slope, carry: (slope(carry["u"]), carry)), "fails on a small example"),
    (dict(descent=Optimiser(lambda g, w, m: (g, (w.zero_(), m)[1]))), "its optimiser writes to the client's weights"),
    (dict(descent=Optimiser(lambda g, w, m: g)), "is returned where the optimiser's vector and table are due"),
    (dict(descent=Optimiser(lambda g, w, m: (g, m), lambda w: None)), "NoneType is returned where a table"),
]


@pytest.mark.parametrize(("ingredients", "sentence"), STEPS)
def test_the_ingredients_of_a_step_are_tried_out_when_a_method_is_made(ingredients, sentence):
    with pytest.raises(RecipeError, match=f"^method: Mine.*({sentence})"):
        Method(part(plan=lambda rule, *_: replace(rule, **ingredients)))


@pytest.mark.parametrize(
    "method", ["man(layers='official_convnet')", ProximalAscent(ActivationNorm(layers="official_convnet"))]
)
def test_a_part_for_one_model_only_need_not_suit_the_small_example(method):
    parse(method)


def zeros(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mine": torch.zeros_like(weights)}


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (
            dict(first_memory=lambda w: {"mine": w.new_zeros(2)}),
            r"its first_memory makes 'mine' a tensor of shape \(2,\) .* where the weights are a tensor of shape \(43",
        ),
        (
            dict(first_memory=lambda w: {"mine": torch.zeros(len(w))}),  # float32 whatever the recipe's precision
            r"its first_memory makes 'mine' .* \(float32\) where the weights are .* \(float64\)",
        ),
        (
            dict(first_memory=zeros, report=lambda u, s, m, o: (u, {"mine": o.delta[:2]})),
            r"its report returns 'mine' as a tensor of shape \(2,\) .*, but in first_memory it is a tensor",
        ),
        (
            dict(first_memory=zeros, report=lambda u, s, m, o: (u, {"mine": o.delta > 0})),
            "its report returns 'mine' as a tensor of shape .* .bool., but in first_memory",
        ),
        (
            dict(first_state=zeros, merge=lambda move, *_: (move, {"mine": move.sum()})),
            r"its merge returns 'mine' as a tensor of shape \(\) .*, but in first_state it is a tensor of shape \(43",
        ),
    ],
)
def test_what_is_kept_has_the_size_and_type_that_it_began_with(members, sentence):
    with pytest.raises(RecipeError, match=f"^method: Mine: {sentence}"):
        Method(part(**members))


def test_a_state_may_have_any_size():
    counting = part(
        first_state=lambda w: {"rounds": w.new_zeros(1)},
        merge=lambda move, server, uploads: (move, {"rounds": server["rounds"] + 1}),
    )
    assert Method(counting).state == ("rounds",)


WRONG: list[tuple[str, Any, str]] = [
    ("broadcast", lambda server: {"weights": server.start.double()}, r"\(float64\) is returned where the weights are"),
    ("broadcast", lambda server: {"on": server.weights > 0}, "hands over 'on' as torch.bool; use the type"),
    ("begin", lambda sent, memory: sent["weights"].double(), r"\(float64\) is returned where the weights are"),
    ("report", lambda u, *_: (u.update(delta=u.delta.double()), {}), r"\(float64\) is returned where the weights are"),
    ("report", lambda u, *_: (u.update(n=u.delta.sum()), {}), "uploads 'n' as a tensor of shape .*; only vectors"),
    ("report", lambda u, *_: (u.update(n=torch.ones(1).int()), {}), "hands over 'n' as torch.int32; use the type"),
    ("merge", lambda move, *_: (move.double(), {}), r"\(float64\) is returned where the weights are"),
    ("first_state", lambda w: {"gate.norms": w.clone()}, "names a vector 'gate.norms'; use letters, digits and _"),
    ("first_memory", lambda w: {"../mine": w.clone()}, "names a vector '../mine'"),
    ("first_memory", lambda w: {0: w.clone()}, "names a vector 0"),
    ("first_state", lambda w: None, "NoneType is returned"),
    ("first_state", lambda w: {"a": 0.0}, "a table of tensors"),
    ("first_memory", lambda w: {"a": 1}, "a table of tensors"),
    ("first_memory", lambda w: w.nothing, "fails on a small example, a network of two linear layers"),
    ("broadcast", lambda server: None, "NoneType is returned"),
    ("broadcast", lambda server: {"weights": server.weights[:3]}, r"a tensor of shape \(3,\) \(float32\) is returned"),
    ("plan", lambda *_: None, "NoneType is returned where plan's rule is due"),
    ("plan", lambda rule, *_: rule.layout.slices["conv1.weight"], "must work with any model"),
    ("report", lambda upload, *_: upload, "Upload is returned where report's upload and memory are due"),
    ("report", lambda upload, *_: (upload.delta, {}), "where report's upload is due"),
    ("report", lambda upload, *_: (upload, None), "NoneType is returned"),
    ("report", lambda upload, *_: (upload, {"new": upload.delta}), "hands over 'new'"),
    ("report", lambda upload, *_: (replace(upload, delta=upload.delta[:3]), {}), "a vector of the model's size"),
    ("merge", lambda move, *_: move, "where merge's move and state are due"),
    ("merge", lambda move, *_: (0.0, {}), "float is returned where a vector of the model's size is due"),
    ("merge", lambda move, *_: (move, {"new": move}), "hands over 'new'"),
    ("evaluated", lambda server: server["nothing"], "fails on a small example"),
    ("evaluated", lambda server: 3, "int is returned"),
    ("stage", "clients", "must be one of 'client', 'server', 'evaluation'"),
    ("sees", "all", "must be one of 'average', 'each'"),
    ("protects", "uploads", "must be one of '', 'upload', 'average'"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG)
def test_what_is_not_due_is_named(name, value, sentence):
    with pytest.raises(RecipeError, match=f"^method: Mine.*{sentence}"):
        Method(part(**{name: value}))


def test_an_option_cannot_have_the_name_of_a_declaration():
    @dataclass(frozen=True)
    class Mine(Part):
        protects: float = option(0.1, "how much")  # type: ignore[assignment]

    with pytest.raises(RecipeError, match=r"Mine\.protects = 0\.1: must be one of"):
        Method(Mine())


def test_options_must_be_fields_so_that_methods_with_other_options_are_not_taken_for_each_other():
    class Set(Part):
        def __init__(self, rate):
            object.__setattr__(self, "rate", rate)

    class Forgotten(Part):
        rate: float = option(0.1, "a rate")

    for mine in Set(1.0), Forgotten():
        with pytest.raises(RecipeError, match=r"needs @dataclass\(frozen=True\) above its class"):
            Method(mine)

    class Other(DynamicDual):
        """A class that only replaces a function needs none."""

    assert Method(Other(0.2)).parts == (Other(0.2),)


def test_a_second_ascent_that_comes_in_a_later_round_is_refused_then():
    late = part(plan=lambda rule, *_: rule.with_ascent(lambda slope, carry: (slope(), carry)) if rule.round else rule)
    method, sent = Method(parse("fedsam").parts[0], late), {"weights": drawn(1)}
    assert method.plan(example_rule(), sent, {}).ascent is not None
    with pytest.raises(RecipeError, match="Mine replaces the ascent of another part in round 3"):
        method.plan(replace(example_rule(), round=3), sent, {})


@dataclass(frozen=True)
class Around(Wrapper):
    def wrap(self, rule, inner, sent, memory):
        return rule


def test_a_wrapped_part_says_too_which_networks_it_fits():
    def refuse(layout):
        raise RecipeError("not this one")

    with pytest.raises(RecipeError, match="not this one"):
        Method(Around(part(fits=refuse))).fits(Layout({}))


@pytest.mark.parametrize("wrapped", [False, True])
def test_protection_reports_last_also_inside_a_wrapper_and_when_it_replaces_the_average(wrapped):
    guard = part(
        "Guard",
        protects="upload",
        report=lambda u, s, m, o: (u.update(delta=u.delta.clamp(-1e-3, 1e-3)), m),
        merge=lambda move, server, uploads: (uploads.sum("delta") / len(uploads), {}),
    )
    loud = part("Loud", report=lambda u, s, m, o: (u.update(delta=u.delta + 1), m))
    method, rule = Method(Around(guard) if wrapped else guard, loud), example_rule()
    upload = Upload(0, 1, 1, 0.1, 0.0, drawn(1))
    made, _ = method.report(upload, {"weights": drawn(1)}, {}, rule.outcome(drawn(1)))
    assert float(made.delta.abs().max()) <= 1.001e-3
    assert method.protection is guard


@pytest.mark.parametrize("other", ["man", DynamicDual])
def test_only_parts_make_a_method(other):
    with pytest.raises(RecipeError, match="is not a part"):
        Method(other)


def test_what_a_wrapper_wraps_must_be_a_part():
    with pytest.raises(RecipeError, match="3 is not a part"):
        Method(ProximalAscent(3))


@pytest.mark.parametrize("source", [ProximalAscent(), ConsensusAscent()])
def test_fedsol_refuses_a_source_with_an_ascent_of_its_own(source):
    with pytest.raises(
        RecipeError, match=f"ProximalAscent uses only the gradient of {type(source).__name__}, whose ascent"
    ):
        Method(ProximalAscent(source))


def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "failing_part.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trusted, "_packages", {"failing_part"})
    with pytest.raises(RecipeError, match=r"failing_part cannot be imported \(RuntimeError: boom\)"):
        parse("failing_part:Mine")
    with pytest.raises(RecipeError, match=r"'my-package\.parts:Mine': is not a path of the form package\.module:Class"):
        parse("my-package.parts:Mine")


@pytest.mark.parametrize(
    "look",
    [
        lambda uploads: uploads.sum("delta", [1.0] * len(uploads)),
        lambda uploads: uploads.weights,
        lambda uploads: list(uploads),
        lambda uploads: uploads[0],
    ],
)
def test_sums_with_weights_of_ones_own_show_single_uploads_and_must_be_declared(look):
    def merge(move, server, uploads):
        look(uploads)
        return move, {}

    with pytest.raises(RecipeError, match='its merge looks at single uploads; declare `sees = "each"`'):
        Method(part(merge=merge))
    Method(part(merge=merge, sees="each"))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("default", "limits", "sentence", "inside", "outside"),
    [
        (1.0, dict(), "a number", [-1e9, 0, 2.5], [INF, -INF, NAN, True, "1", None]),
        (1.0, dict(low=0), "a number ≥ 0", [0, 0.0, 7], [-1e-9, INF, False]),
        (1.0, dict(low=0, open_low=True), "a number > 0", [1e-9, 3], [0, 0.0, -1]),
        (1.0, dict(low=0, high=2), "a number from 0 to 2", [0, 1.5, 2], [-0.1, 2.1]),
        (1.0, dict(low=0, high=2, open_low=True), "a number > 0 and ≤ 2", [0.1, 2.0], [0, 2.1]),
        (3, dict(low=1), "a whole number ≥ 1", [1, 9], [0, 1.0, 2.5, True]),
        (3, dict(low=1, high=4), "a whole number from 1 to 4", [1, 4], [5, 2.0]),
        (False, dict(), "true or false", [True, False], [0, 1, 1.0, "true"]),
        ("a", dict(choices=("a", "b")), "'a' or 'b'", ["a", "b"], ["c", 0, None]),
        ("a", dict(choices=("a", "b", "c")), "'a', 'b' or 'c'", ["c"], ["d"]),
        ("a", dict(choices=("a",)), "'a'", ["a"], ["b"]),
        (0, dict(choices=(0, 1)), "0 or 1", [0, 1], [2, 0.0, 1.0]),
    ],
)
def test_the_values_that_an_option_may_take(default, limits, sentence, inside, outside):
    allowed = option(default, "", **limits).metadata["range"]
    assert str(allowed) == sentence
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)


def test_a_move_arrives_at_the_weights_plus_the_servers_rate_times_it():
    weights, move = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.5])
    assert ServerView(weights, weights, 0, 10, lr=0.5).arrival(move).tolist() == [3.0, -1.75]


def test_a_method_is_run_on_the_example_once():
    """Equal parts compose alike; an option that is equal but written otherwise is another method."""
    runs = []

    @dataclass(frozen=True)
    class Counted(Part):
        rate: float = 1.0

        def plan(self, rule, sent, memory):
            runs.append(self.rate)
            return replace(rule, decay=rule.decay + self.rate)

    first = Method(Counted(1.0))
    seen = len(runs)
    assert seen and repr(Method(Counted(1.0))) == repr(first)
    assert len(runs) == seen
    assert repr(Method(Counted(1))) == "Method(" + repr(Counted(1)) + ")"
    assert len(runs) > seen


def test_a_part_without_a_hash_is_composed_each_time():
    @dataclass(frozen=True)
    class Listed(Part):
        rates: list[float]

        def plan(self, rule, sent, memory):
            return replace(rule, decay=rule.decay + sum(self.rates))

    assert Method(Listed([0.5])).parts == (Listed([0.5]),)


WRONG = {
    "broadcast": (lambda server: {"v": 1} if server.round > 1 else {"v": server.weights}, "a table of tensors"),
    "begin": (lambda sent, memory: 3 if sent["late"].max() > 1 else None, "a vector of the model's size"),
    "plan": (lambda rule, sent, memory: None if rule.round > 1 else rule, "plan's rule"),
    "report": (lambda u, s, m, outcome: u if outcome.rule.round > 1 else (u, m), "report's upload and memory"),
    "merge": (lambda move, server, u: move if server.round > 1 else (move, {}), "merge's move and state"),
}


@pytest.mark.parametrize("function", WRONG)
def test_a_wrong_type_in_a_later_round_is_one_sentence_that_names_the_part(function, digits):
    wrong, due = WRONG[function]
    late = {"broadcast": lambda server: {"late": torch.full_like(server.weights, server.round)}}
    method = Method(part("Late", **late | {function: wrong}))
    run = dict(cohort=2, steps=1, batch=8, seed=0, group=1)
    train(digits, "mlp", method, rounds=2, **run)
    with pytest.raises(RecipeError, match=f"^method: Late: .* is returned where {due}"):
        train(digits, "mlp", method, rounds=3, **run)


def test_two_parts_of_one_class_draw_independently_and_the_first_as_if_it_were_alone():
    drawn_numbers: list[tuple[str, float]] = []

    @dataclass(frozen=True)
    class Draws(Part):
        label: str

        def note(self, where, giver):
            drawn_numbers.append((self.label + where, float(torch.rand(1, generator=giver.generator("Draws")))))

        def broadcast(self, server):
            self.note(" broadcast", server)
            return {}

        def plan(self, rule, sent, memory):
            self.note(" plan", rule)
            return rule

        def report(self, upload, sent, memory, outcome):
            self.note(" report", outcome.rule)
            return upload, memory

        def merge(self, move, server, uploads):
            self.note(" merge", server)
            return move, {}

    def seen(*labels):
        method = Method(*map(Draws, labels))
        drawn_numbers.clear()
        weights = drawn(1)
        server = ServerView(weights, weights, 3, 4)
        rule = replace(example_rule(), round=3)
        sent = method.broadcast(server)
        planned = method.plan(rule, sent, {})
        assert planned.stream == "", "what follows the parts draws as before"
        upload, _ = method.report(Upload(0, 1, 4, 0.1, 1.0, drawn(2)), sent, {}, planned.outcome(drawn(2)))
        method.merge(drawn(2), server, collect([upload], "samples"))
        return dict(drawn_numbers)

    alone, both = seen("a"), seen("a", "b")
    assert {name: both[name] for name in alone} == alone
    assert len({*both.values()}) == 4, "one number for plan and report, one for broadcast and merge, of each part"
