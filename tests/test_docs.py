"""The code in the README and the how-to runs as it stands there."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from fedflat import Method

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!http)([^)#\s]+)\)")


def blocks(file):
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text("utf-8"), re.S)


def test_the_readmes_lines_of_python_run():
    (code,) = blocks("README.md")
    space = {}
    exec(compile(code, "README.md", "exec"), space)
    assert space["result"].accuracy > 0.9


def test_the_how_tos_python_runs_in_order():
    space = {}
    first, handed_out, data, *parts, probe, adapted, _, task = blocks("docs/how-to.md")
    exec(compile(first, "how-to", "exec"), space)
    exec(compile(handed_out, "how-to", "exec"), space)
    assert float(space["right"].double().mean()) == space["result"].accuracy
    exec(compile(data, "how-to", "exec"), dict(space))
    for part in parts:
        exec(compile(part, "how-to", "exec"), space)
        assert len(space["result"].history) == 3
    exec(compile(probe, "how-to", "exec"), space)
    assert space["probed"].history[0]["bytes_up"] == len(space["probed"].history[0]["cohort"]) * 4 * (32 * 10 + 10)
    exec(compile(adapted, "how-to", "exec"), space)
    assert not any("adapter" in name for name, _ in space["plain"].named_modules())
    exec(compile(data, "how-to", "exec"), space)
    exec(compile(task.replace("rounds=3", 'rounds=3, engine="inline"'), "how-to", "exec"), space)  # no module has it
    assert space["median"].last("mae") > 0


def test_the_how_tos_parts_do_what_their_docstrings_say():
    """Each block leaves its class behind; small closed forms say what they are."""
    import torch

    from fedflat.local import LocalRule, Outcome
    from fedflat.methods import ServerView, Upload, collect

    silent = type("fedflat", (), {"train": staticmethod(lambda *_, **__: None), "Method": Method})
    space = {"fedflat": silent, "federation": None}
    for part in blocks("docs/how-to.md")[3:-4]:
        exec(compile(part, "how-to", "exec"), space)
    w, delta, rule = torch.tensor([1.0, -2.0]), torch.tensor([0.3, -0.1]), LocalRule(0.1, 2)
    outcome = Outcome(delta, 0.0, rule, {}, {})

    class Quadratic:  # f(w) = ‖w‖²
        weights = w

        def __call__(self, at=0.0):
            return 2 * (w + at)

    gradient, _ = space["Extragradient"](0.1).plan(rule, {}, {}).ascent(Quadratic(), {})
    torch.testing.assert_close(gradient, 2 * (w - 0.1 * 2 * w))

    upload = Upload(0, 1, 2, 0.1, 0.0, delta.repeat(4000))
    rounded, _ = space["RandomRounding"](0.25).report(upload, {}, {}, outcome)
    assert {round(4 * x) for x in rounded.delta.tolist()} == {1, 2, 0, -1}
    torch.testing.assert_close(rounded.delta.view(-1, 2).mean(0), delta, rtol=0, atol=0.01)

    anchors, sent = space["TwoAnchors"](0.5, 0.75), {"weights": w, "mean": 3 * w}
    planned = anchors.plan(rule, sent, {"own": w})
    torch.testing.assert_close(planned.pull + planned.decay * w, 0.5 * (w - 2 * w))
    assert torch.equal(anchors.report(upload, sent, {}, outcome)[1]["own"], w + delta)
    view = ServerView(w, w, 0, 4, {"mean": 3 * w})
    _, state = anchors.merge(delta, view, collect([upload], "uniform"))
    torch.testing.assert_close(state["mean"], 0.75 * 3 * w + 0.25 * (w + delta))

    lion = space["Lion"](0.5, 0.75)
    direction, memory = lion(w, w, {"mean": torch.tensor([-3.0, 0.0])}, None, 0)
    assert direction.tolist() == [-1.0, -1.0] and memory["mean"].tolist() == [-2.0, -0.5]


@pytest.mark.parametrize("file", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_every_link_leads_somewhere(file):
    folder = (ROOT / file).parent
    missing = [link for link in LINK.findall((ROOT / file).read_text("utf-8")) if not (folder / link).exists()]
    assert not missing


def documented():
    """Every function of the API reference, and every public method and property of its classes, by name."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for path in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M):
            home, _, name = path.rpartition(".")
            thing = getattr(import_module(home), name)
            if not inspect.isclass(thing):
                yield path, thing
                continue
            yield path, thing
            for key, value in vars(thing).items():
                value = getattr(value, "__func__", value)
                if not key.startswith("_") and (isinstance(value, property) or inspect.isfunction(value)):
                    yield f"{path}.{key}", value


def lacks(thing):
    """What the docstring does not say: anything, its arguments, or what it raises."""
    text = inspect.getdoc(thing)
    if not text:
        return "a docstring"
    if isinstance(thing, property) or inspect.isclass(thing):
        return ""
    takes = [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]
    if len(takes) > 1 and "Args:" not in text:
        return f"Args of {takes}"
    raises = re.search(r"^\s*raise \w*Error", inspect.getsource(inspect.unwrap(thing)), re.M)
    return "Raises" if raises and "Raises:" not in text else ""


def test_the_reference_says_what_is_taken_and_what_is_raised():
    assert not {name: missing for name, thing in documented() if (missing := lacks(thing))}


def test_the_how_to_lists_every_field_of_a_recipe():
    from fedflat.recipe import Recipe

    text = (ROOT / "docs" / "how-to.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (?:`\[)?(\w+)(?:\]`)? \| (.*) \|$", text, re.M))
    sections = {name: field.annotation for name, field in Recipe.model_fields.items()}
    fields = {name: getattr(kind, "model_fields", None) for name, kind in sections.items()}
    listed = {name: [*known] for name, known in fields.items() if known}
    listed["top"] = [name for name, known in fields.items() if not known]
    missing = {name: [each for each in known if f"`{each}`" not in rows[name]] for name, known in listed.items()}
    assert not any(missing.values()), missing
