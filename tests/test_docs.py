"""The code in the README and the how-to runs as it stands there."""

import re
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
    import torch

    x = torch.randn(30, 4)
    space = {"inputs": x, "labels": torch.arange(30) % 7, "test_samples": None}
    first, data, *parts, probe, adapted, _ = blocks("docs/how-to.md")
    exec(compile(first, "how-to", "exec"), space)
    exec(compile(data.replace("test_samples", "samples"), "how-to", "exec"), dict(space))
    for part in parts:
        exec(compile(part, "how-to", "exec"), space)
        assert len(space["result"].history) == 3
    exec(compile(probe, "how-to", "exec"), space)
    assert space["probed"].history[0]["bytes_up"] == len(space["probed"].history[0]["cohort"]) * 4 * (32 * 10 + 10)
    exec(compile(adapted, "how-to", "exec"), space)
    assert not any("adapter" in name for name, _ in space["plain"].named_modules())


def test_the_how_tos_parts_do_what_their_docstrings_say():
    """Each block leaves its class behind; small closed forms say what they are."""
    import torch

    from fedflat.local import LocalRule, Outcome
    from fedflat.methods import ServerView, Upload, collect

    silent = type("fedflat", (), {"train": staticmethod(lambda *_, **__: None), "Method": Method})
    space = {"fedflat": silent, "federation": None}
    for part in blocks("docs/how-to.md")[2:-3]:
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
