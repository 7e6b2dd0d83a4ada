"""Secrets of a deployment: cohorts and orders of samples that nobody else can compute, an ε that holds or is null."""

import json
import shutil
import stat

import pytest
import torch

from fedflat.errors import RecipeError, RunError
from fedflat.randomness import Secret, generator, key, numpy_generator
from fedflat.recipe import Server
from fedflat.rounds import draw_cohort

pytest.importorskip("flwr")
project = pytest.importorskip("fedflat.flower.project")
pytestmark = pytest.mark.filterwarnings("ignore")
SECRET = ["deployment.draws=secret", "split.clients=8", "server.cohort=4", "server.rounds=6", "deployment.wait=20"]
CENTRAL = 'method=central_dp(clip=0.5, noise=2.0, entropy="system")'
LOCAL = 'method=local_dp(clip=0.5, noise=8.0, entropy="system")'


@pytest.fixture
def told(loopback):
    """A grid that keeps all that the server tells its clients, and the list of it."""
    heard = []

    class Overheard(loopback.InProcess):
        def answers(self, message):
            heard.append(message)
            return super().answers(message)

    return Overheard, heard


def cohorts(records):
    return [record["cohort"] for record in records]


def test_cohorts_do_not_follow_from_anything_that_a_client_knows(deployed, small):
    recipe = small(*SECRET)
    guessed = [draw_cohort(recipe.server, 8, recipe.seed, round) for round in range(6)]
    assert cohorts(deployed(recipe)[1]) != guessed


def test_two_runs_of_one_recipe_have_other_cohorts_and_weights(deployed, small, tmp_path):
    recipe = small(*SECRET)
    first = deployed(recipe)
    (tmp_path / "out").rename(tmp_path / "before")
    second = deployed(recipe)
    assert cohorts(first[1]) != cohorts(second[1]) and first[0] != second[0]


def test_the_servers_secret_is_private_and_kept_for_resuming(deployed, small, tmp_path, cut_in):
    recipe, memory = small(*SECRET, "method=scaffold"), str(tmp_path / "memory")
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(3), memory=memory)
    kept = tmp_path / "out" / "deployment.secret"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and len(bytes.fromhex(kept.read_text().strip())) == 32
    # Round 3 again from the checkpoint, and once more from a copy of it: the same cohort, the same bits.
    (saved := tmp_path / "saved").mkdir()
    for name in "out", "memory":
        shutil.copytree(tmp_path / name, saved / name)
    first = deployed(recipe, memory=memory)
    for name in "out", "memory":
        shutil.rmtree(tmp_path / name)
        (saved / name).rename(tmp_path / name)
    assert deployed(recipe, memory=memory) == first


def test_a_run_whose_secret_is_gone_is_not_gone_on_with(deployed, small, tmp_path, cut_in):
    with pytest.raises(ConnectionAbortedError):
        deployed(small(*SECRET), cut_in(2))
    (tmp_path / "out" / "deployment.secret").unlink()
    with pytest.raises(RunError, match="is missing, and draws the cohorts; start a new run"):
        deployed(small(*SECRET))


def test_no_seed_is_ever_sent(deployed, small, told, tmp_path):
    grid, heard = told
    deployed(small(*SECRET, "evaluation.sharpness=3", "seed=987654321", "split.seed=5"), grid)
    secret = (tmp_path / "out" / "deployment.secret").read_text().strip()
    facts = [dict(message.content["facts"]) for message in heard]
    assert {name for each in facts for name in each} == {
        "run", "round", "lr", "everyone", "kept_round", "kept_digest", "recipe"}  # fmt: skip
    assert "987654321" not in str(facts) and secret not in str(facts)


def test_nor_does_the_app_that_clients_get_have_it(tmp_path, small):
    project.write_app(tmp_path / "wards", small(*SECRET, "seed=987654321"))
    recipe = (tmp_path / "wards" / "wards" / "recipe.toml").read_text().splitlines()
    assert recipe[0] == "seed = 0"
    # That of the split stays: all who share one data set must part it in the same way.
    assert [line for line in recipe if "987654321" in line] == ["seed = 987654321"]
    project.write_app(tmp_path / "rehearsal", small("seed=987654321"))
    assert (tmp_path / "rehearsal" / "rehearsal" / "recipe.toml").read_text().startswith("seed = 987654321\n")


def test_a_clients_order_of_samples_is_its_own(tmp_path):
    from fedflat.flower.tally import DiskBook, seed_of

    seeds = {seed_of(DiskBook(tmp_path / str(i), 0).secret(), run) for i in range(3) for run in ("a", "b")}
    assert len({int(seed) for seed in seeds}) == 6


@pytest.mark.parametrize("method", ["central_dp(noise=2.0)", "local_dp(noise=8.0)"])
def test_noise_from_the_recipes_seed_is_refused(deployed, small, method):
    for draws in "secret", "recipe":
        changes = [*SECRET, f"method={method}", f"deployment.draws={draws}", "deployment.wait=1"]
        with pytest.raises(Exception, match=r"noise of \w+ would follow from the recipe's seed"):
            deployed(small(*changes))


def test_epsilon_is_reported_where_the_cohorts_are_secret(deployed, small, tmp_path):
    pytest.importorskip("dp_accounting")
    changes = [CENTRAL, "server.sampling=bernoulli", "server.rounds=2", "deployment.wait=20"]
    secret = deployed(small(*changes, "deployment.draws=secret"))[1]
    assert all(record["epsilon"] > 0 for record in secret)
    (tmp_path / "out").rename(tmp_path / "before")
    rehearsed = deployed(small(*changes, "deployment.draws=recipe"))[1]
    assert [(record["epsilon"], record["epsilon_missing"]) for record in rehearsed] == [
        (None, "the cohorts follow from the recipe's seed, which every client knows")] * 2  # fmt: skip
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["epsilon"] is None


def test_under_local_noise_the_clients_losses_stay_with_them(deployed, small):
    pytest.importorskip("dp_accounting")
    _, records = deployed(small(LOCAL, "deployment.draws=secret", "server.rounds=2"))
    assert all(record["local_loss"] is None and record["epsilon"] > 0 for record in records)


@pytest.mark.parametrize("asked", ["evaluation.sharpness=1", 'evaluation.measures=["local_curvature"]'])
def test_questions_that_no_client_would_answer_are_not_asked(deployed, small, asked):
    field = asked.partition("=")[0]
    with pytest.raises(RecipeError, match=f"^{field}: clients with a private method answer no question"):
        deployed(small(LOCAL, "deployment.draws=secret", asked))


def test_cohorts_that_anybody_can_compute_are_for_rehearsals(deployed, small):
    with pytest.raises(RecipeError, match=r"^server.draws = 'fedsol': anyone can compute these cohorts"):
        deployed(small("deployment.draws=secret", "server.draws=fedsol"))


# --------------------------------------------------------------------------------------------------------------------
# Generators
# --------------------------------------------------------------------------------------------------------------------


def test_a_secret_is_more_than_32_bits_in_every_generator():
    """torch's manual_seed takes the low 32 bits of its seed: these secrets differ only far above them."""
    low = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5 + 2**40)
    assert torch.equal(*(torch.rand(9, generator=g) for g in low))
    secrets = [Secret(5), Secret(5 + 2**40), Secret(5 + 2**250)]
    drawn = {tuple(torch.rand(9, generator=generator(s, "batches")).tolist()) for s in secrets}
    assert len(drawn) == 3
    assert len({tuple(numpy_generator(s, "cohort").random(9)) for s in secrets}) == 3
    # and the whole state is the secret's: not two words in common but by chance
    states = [generator(s, "batches").get_state()[24 : 24 + 8 * 624] for s in secrets]
    words = [set(state.numpy().view("uint64").tolist()) for state in states]
    assert len(words[0]) > 600 and len(words[0] & words[1]) < 3


def test_its_draws_are_uniform_and_repeatable():
    draws = torch.rand(1_000_000, generator=generator(Secret(2**255 - 19), "batches", 3, 7))
    assert draws.mean() == pytest.approx(0.5, abs=2e-3) and draws.var() == pytest.approx(1 / 12, rel=1e-2)
    assert torch.equal(draws, torch.rand(1_000_000, generator=generator(Secret(2**255 - 19), "batches", 3, 7)))


def test_a_secret_shows_in_no_text():
    secret = Secret(123456789)
    assert "123456789" not in f"{secret} {secret!r} {secret:>20} {[secret]}" + str(secret)
    assert key(secret, "cohort") != key(123456789, "cohort")


def test_cohorts_of_a_secret_are_drawn_as_the_accountant_assumes():
    """Each client with probability 1/4, independently; a fixed size without replacement."""
    server, rounds = Server(cohort=0.25, sampling="bernoulli"), 2000
    drawn = [draw_cohort(server, 8, Secret(2**200 + 1), round, empty=True) for round in range(rounds)]
    counts = torch.tensor([[float(c in cohort) for c in range(8)] for cohort in drawn])
    assert torch.allclose(counts.mean(0), torch.full((8,), 0.25), atol=4 * (0.25 * 0.75 / rounds) ** 0.5)
    covariance = torch.cov(counts.T) - torch.diag(torch.cov(counts.T).diag())
    assert covariance.abs().max() < 4 * 0.25 * 0.75 / rounds**0.5
    fixed = [draw_cohort(Server(cohort=3), 8, Secret(7), round) for round in range(50)]
    assert {len(set(cohort)) for cohort in fixed} == {3}
