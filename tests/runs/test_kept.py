"""The models that a run keeps, and one round computed again: bit for bit that of the run."""

import pytest
import torch

from fedflat.errors import RunError
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.kept import kept_checkpoints, kept_models, local_round, located
from fedflat.runs.loading import load_run

TINY = ["split.clients=6", "split.alpha=0.5", "model.hidden=[8]", "server.rounds=5", "server.cohort=3", "local.lr=0.1"]
TINY += ["server.average=uniform"]


@pytest.fixture(scope="module", params=["fedavg", "feddyn"])
def run(request, tmp_path_factory):
    """Every second round is kept; the others are saved, and all but the last of them removed."""
    path = tmp_path_factory.mktemp("runs") / "run"
    settings = [*TINY, f"method={request.param}", "engine=inline", "checkpoint.every=1", "checkpoint.keep=2"]
    execute(prepare(load(None, settings)), path)
    return path


def test_every_nth_round_is_kept_from_the_first_model_on(run):
    kept = [int(path.stem) for path in kept_checkpoints(run)]
    assert {0, 2, 4, 5} <= {*kept} and len(kept) <= 5  # the best may be one more
    problem = load_run(run)
    last = problem.network.weights.clone()
    rounds, models = kept_models(run, problem)
    assert rounds == [0, 2, 4, 5]
    assert torch.equal(models[-1], last)
    assert torch.equal(models[0], prepare(load(None, [*TINY, "engine=inline"])).network.weights)


def test_the_round_computed_again_ends_at_the_runs_own_next_model(run):
    """The oracle of the clients' models: their merge is what the run itself made of them, to the bit."""
    problem = load_run(run)
    _, models = kept_models(run, problem)
    found = local_round(problem, located(f"{run}@4"))
    assert found.round == 5 and len(found.models) == 3
    assert torch.equal(found.start, models[2]) and torch.equal(found.average, models[3])
    if problem.method.memory == ():
        mean = torch.stack([*found.models.values()]).double().mean(dim=0)
        torch.testing.assert_close(mean, models[3].double(), rtol=0, atol=1e-6)


def test_a_run_that_keeps_models_can_be_resumed_from_the_first(run, tmp_path):
    from fedflat.runs.folder import read_recipe

    problem = prepare(read_recipe(run))
    execute(problem, tmp_path / "again")
    execute(prepare(read_recipe(run)), tmp_path / "again", resume=True, back_to=0)
    assert torch.equal(load_run(tmp_path / "again").network.weights, load_run(run).network.weights)


def test_a_round_that_was_not_kept_is_named(run, tmp_path):
    assert located(str(run)) == run
    with pytest.raises(RunError, match=r"@1: no checkpoint of that round is kept; there are those of 0, 2, .*keep"):
        located(f"{run}@1")
    with pytest.raises(RunError, match="no run is here"):
        located(f"{tmp_path}@1")
