"""What a part must keep to is checked when a method is made, and a mistake is one sentence that names the part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedflat import Method, Part, option
from fedflat.catalogue import CATALOGUE
from fedflat.errors import RecipeError
from fedflat.methods import parse
from fedflat.parts import ConsensusAscent, DynamicDual, LocalPrivacy, ProximalAscent


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


WRONG: list[tuple[str, Any, str]] = [
    ("first_state", lambda w: None, "NoneType is returned"),
    ("first_state", lambda w: {"a": 0.0}, "a table of tensors"),
    ("first_memory", lambda w: {"a": 1}, "a table of tensors"),
    ("first_memory", lambda w: w.nothing, "fails on a small example, a network of two linear layers"),
    ("broadcast", lambda server: None, "NoneType is returned"),
    ("broadcast", lambda server: {"weights": server.weights[:3]}, r"a tensor of shape \(3,\) is returned"),
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


@pytest.mark.parametrize("other", ["man", DynamicDual])
def test_only_parts_make_a_method(other):
    with pytest.raises(RecipeError, match="is not a part"):
        Method(other)


def test_what_a_wrapper_wraps_must_be_a_part():
    with pytest.raises(RecipeError, match="3 is not a part"):
        Method(ProximalAscent(3))


def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "failing_part.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"failing_part cannot be imported \(RuntimeError: boom\)"):
        parse("failing_part:Mine")
    with pytest.raises(RecipeError, match=r"my-package\.parts cannot be imported"):
        parse("my-package.parts:Mine")
