"""The pages of docs/methods say what the code says."""

from pathlib import Path

import pytest

from fedflat.report.method_pages import pages
from fedflat.report.method_runs import figures, studied

FOLDER = Path(__file__).parents[2] / "docs" / "methods"


def test_every_method_has_its_page_and_every_page_is_current():
    written = {file.name: file.read_text("utf-8") for file in FOLDER.glob("*.md")}
    assert written == pages(), "run: make results"


def test_every_run_stands_beside_its_papers_number():
    """Only the fixed radius and FedSAM's large ones have none: the paper shows them in pictures alone."""
    without = {(each.study, each.method) for each in studied() if not each.paper}
    assert without == {
        ("fashion-sol", "fedsol(rho=2.0, radius='fixed')"),
        *(("fashion-sol-radius", f"fedsol(rho={rho}, radius='fixed')") for rho in (0.5, 1.0)),
        *(("fashion-sol-radius", f"fedsam({rho})") for rho in (0.5, 1.0, 2.0)),
    }


def test_what_a_study_varies_beside_the_method_is_not_pooled():
    page = (FOLDER / "fedsam.md").read_text("utf-8")
    for precision in ("float32", "bf16"):
        assert f"| fashion-bf16 | `fedsam(0.1)`, {precision} | 8 |" in page
    assert all(len({row["values"]["seed"] for row in each.rows}) == len(each.rows) for each in studied())


def test_a_study_with_a_single_evaluation_has_its_row_without_a_figure():
    """MAN's own network was evaluated after the last round only."""
    page = (FOLDER / "man.md").read_text("utf-8")
    assert "| fashion-lenet | `fedavg + man(0.15)` |" in page
    assert "man-fashion-lenet.svg" not in page and "man-fashion-mlp.svg" in page
    assert not any("fashion-lenet" in name for name in figures(studied()))


@pytest.mark.parametrize(
    ("study", "method", "number"),
    [
        ("fashion-mlp", "fedavg + man(0.15)", "52.0 (CIFAR-100, δ = 0.3)"),
        ("fashion-mlp", "feddyn(0.1)", "83.22 ± 0.18 (CIFAR-10, Dirichlet, u = 0.6)"),
        ("fashion-mlp", "fedspeed", "50.95 (CIFAR-100, δ = 0.3)"),
        ("fashion-sol", "fedsol(rho=2.0, radius='dim0')", "64.13 ± 0.46 (LDA, CIFAR-10, α = 0.1)"),
        ("fashion-sol", "fedsol(rho=2.0, radius='dim0', scope='head')", "63.25 (Head, ρ = 2.0)"),
        ("fashion-sol", "fedsol(rho=0.5, radius='dim0')", "61.17 (All, ρ = 0.5)"),
        ("fashion-sol", "fedbabu", "personalised: 89.2 ± 8.4 (FedBabu, e = 5, CIFAR-10; ours "),
        ("cifar10-lenet-small", "fedsmoo", "80.82 ± 0.17 (CIFAR-10, Dirichlet, u = 0.1)"),
    ],
)
def test_the_number_is_that_of_the_papers_own_row_and_column(study, method, number):
    (found,) = (each for each in studied() if (each.study, each.method) == (study, method))
    assert found.paper.startswith(number)
