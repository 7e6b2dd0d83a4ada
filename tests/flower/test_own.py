import pytest

pytest.importorskip("flwr")

from fedflat.flower.own import NOBODY, own_problem
from fedflat.randomness import Secret
from fedflat.rounds import ledger_of


@pytest.mark.parametrize("client", [NOBODY, 1])
def test_each_side_draws_by_its_secret_and_by_the_recipes_seed_in_a_rehearsal(small, client):
    recipe = small("seed=3")
    secretly, openly = (own_problem(recipe, client, 10, None, secret) for secret in (Secret(2**200), None))
    assert isinstance(secretly.seed, Secret) and secretly.seed == 2**200
    assert openly.seed == 3 == secretly.recipe.seed
    assert str(2**200) not in repr(secretly)


def test_a_client_elsewhere_shares_no_step_whatever_the_recipe_says(small):
    for group in (0, 4):
        problem = own_problem(small(f"engine.group={group}"), 1, 10, None)
        assert problem.deployed and problem.group == problem.recipe.engine.group == 1


def test_epsilon_holds_only_if_the_cohorts_are_drawn_by_a_secret(small):
    pytest.importorskip("dp_accounting")
    recipe = small("method=central_dp(noise=2.0, entropy='system')", "server.sampling=bernoulli")
    missing = [ledger_of(own_problem(recipe, NOBODY, 1, None, secret)).missing for secret in (Secret(5), None)]
    assert missing == ["", "the cohorts follow from the recipe's seed, which every client knows"]
