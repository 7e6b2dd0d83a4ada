import pytest

pytest.importorskip("flwr")

from fedflat.flatness import Portion
from fedflat.flower.own import NOBODY, own_problem, with_sizes
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


def test_a_client_that_claims_a_billion_samples_takes_nobodys_share(small):
    """Balanced methods divide by nᵢ m/N on the clients, and λ₁ weighs them by it."""
    server = own_problem(small("admission.max_share=10.0"), NOBODY, 1, None)
    honest = {0: 100, 1: 120, 2: 80}
    before, after = (with_sizes(server, sizes).federation for sizes in (honest, {**honest, 3: 10**9}))
    assert [before.share(client) for client in honest] == [client * 4 / 300 for client in honest.values()]
    assert [after.share(client) for client in honest] == [client * 4 / 1400 for client in honest.values()]
    assert after.share(3) == 1100 * 4 / 1400, "ten times the median of 80, 100, 120 and 10⁹"
    counts = [Portion(280).count(after, client) for client in range(4)]
    assert counts == [20, 24, 16, 220]


def test_what_such_a_client_is_told_of_the_others_gives_it_the_share_that_counts(small):
    server = own_problem(small("admission.max_share=10.0"), NOBODY, 1, None)
    federation = with_sizes(server, {0: 100, 1: 120, 2: 80, 3: 10**9}).federation
    assert [federation.told(n) for n in (80, 100, 120, 1100)] == [1400] * 4
    assert federation.told(10**9) >= 10**9, "no client is told of fewer samples than it has"
    assert 10**9 * 4 / federation.told(10**9) == pytest.approx(federation.share(3))
