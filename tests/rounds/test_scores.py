"""A model is scored without being copied, and not again while nothing has changed."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from fedflat import models, train
from fedflat.engine.inline import Inline
from fedflat.engine.pool import START, Pool
from fedflat.errors import TrainingError
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.rounds import client
from fedflat.rounds.server import first_state
from fedflat.rounds.setup import Problem

FORKED = pytest.mark.skipif(START != "fork", reason="forked workers have the passes counted")
ENGINES = ["inline", pytest.param("pool", marks=FORKED)]


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """Tells the number of samples in each chunk that was scored, by this process or by its worker."""
    file, score = tmp_path / "passes", client.score
    file.touch()

    def noted(*arguments):
        with file.open("a") as lines:
            lines.write(f"{len(arguments[1])}\n")
        return score(*arguments)

    monkeypatch.setattr(client, "score", noted)
    return lambda: [int(line) for line in file.read_text().split()]


def engine_of(problem, state, workers):
    return Pool(problem, state, slots=2, workers=workers) if workers else Inline(problem)


def problem_of(federation):
    return Problem.of(federation, Network(models.build("mlp", (1, 8, 8), 10, hidden=(12,))), parse("fedavg"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_is_scored_again_only_if_it_or_the_question_has_changed(digits, passes, engine):
    problem = problem_of(digits)
    state, size = first_state(problem), len(digits.dataset.test)
    with closing(engine_of(problem, state, workers=int(engine == "pool"))) as engine:
        first = engine.score(state, "test", 1000)
        assert engine.score(replace(state, round=5), "test", 1000) is first and passes() == [size]
        same = engine.score(replace(state, weights=state.weights.clone()), "test", 1000)
        assert same == first and same is not first and passes() == [size] * 2
        engine.score(state, "test", size - 1)
        engine.score(state, "train", 2000)
        assert passes()[2:] == [size - 1, 1, len(digits.dataset.train)]
        before = engine.score(state, "test", 1000)
        state.weights.mul_(2)
        assert engine.score(state, "test", 1000).loss != before.loss


@pytest.mark.parametrize("engine", ENGINES)
def test_the_model_before_a_round_is_not_scored_twice(digits, passes, engine):
    settings = dict(model="mlp", cohort=2, lr=0.1, engine=engine, workers=1, measures=["local"], evaluation_batch=1000)
    result = train(digits, **settings, rounds=3)
    # The local models and the new global one; the one before only in the first round.
    assert len(passes()) == 4 + 3 + 3
    assert [r["local_accuracy_before"] for r in result.history[1:]] == [r["accuracy"] for r in result.history[:-1]]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_round_needs_no_evaluation(digits, passes, engine):
    settings = dict(engine=engine, workers=1, evaluation_batch=1000)
    with pytest.raises(TrainingError, match="3 rounds in a row were skipped"):
        train(digits, rounds=5, cohort=2, quorum=3, patience=3, **settings)
    assert len(passes()) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_scoring_leaves_the_network_as_it_was(digits, workers):
    problem = problem_of(digits)
    state, own = first_state(problem), problem.network.weights
    own.fill_(7.0)
    with closing(engine_of(problem, state, workers)) as engine:
        engine.score(state, "test", 100)
    assert problem.network.weights is own and bool((own == 7.0).all())
    parameter = next(problem.network.module.parameters())
    assert parameter.data_ptr() == own.data_ptr()


def test_weights_that_lie_off_a_cache_line_give_the_same_score(digits):
    problem = problem_of(digits)
    worker, state = client.Worker(problem), first_state(problem)
    shifted = torch.empty(state.weights.numel() + 1)[1:].copy_(state.weights)
    assert shifted.data_ptr() % client.ALIGNED
    scores = [worker.score(weights, state.buffers, "test", 0, 300) for weights in (state.weights, shifted)]
    assert scores[0] == scores[1]
