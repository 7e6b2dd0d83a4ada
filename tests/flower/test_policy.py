"""A client that distrusts its server: what the server asks beyond the client's policy is refused, noted and counted."""

import json
import os
import stat
import tomllib

import numpy as np
import pytest

from fedflat import federation
from fedflat.errors import TrainingError
from fedflat.recipe import load

flwr = pytest.importorskip("flwr.app")
policies = pytest.importorskip("fedflat.flower.policy")
tallies = pytest.importorskip("fedflat.flower.tally")
from fedflat.flower import client_app, messages  # noqa: E402
from fedflat.flower.own import own_problem  # noqa: E402
from fedflat.rounds import first_state, view  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = "0123456789abcdef"
PRIVATE = 'method=local_dp(clip=0.1, noise=8.0, entropy="system")'


class Spy:
    """A server that asks one client whatever it likes, by messages of its own making."""

    def __init__(self, loopback, recipe, folder, policy="", client=2, data=None, memory=True):
        self.recipe, self.client, self.folder = recipe, client, folder
        folder.mkdir(exist_ok=True)
        config = {"memory": str(folder / "memory")} if memory else {}
        if policy is not None:
            (folder / "policy.toml").write_text(policy)
            config["policy"] = str(folder / "policy.toml")
        self.grid = loopback.InProcess(client_app(recipe, data), recipe.split.clients, **config)
        self.problem = own_problem(recipe, -1, 1, None, dict.fromkeys(range(recipe.split.clients), 1))
        sent = self.problem.method.broadcast(view(self.problem, first_state(self.problem)))
        self.weights = sent["weights"]
        self.sent = sent

    def ask(self, kind, vectors=None, **facts):
        """The facts and vectors of the client's reply."""
        known = {"run": RUN, "round": 0, "lr": self.recipe.local.lr, "everyone": 1437, "kept_round": -1,
                 "kept_digest": "", "recipe": policies.digest(self.recipe)}  # fmt: skip
        content = messages.content(vectors or {}, {**known, **facts})
        message = flwr.Message(content=content, dst_node_id=100 + self.client, message_type=kind)
        (name,) = self.grid.push_messages([message])
        (reply,) = self.grid.pull_messages([name])
        assert not reply.has_error(), reply.error.reason
        return messages.read_facts(reply.content), dict(reply.content["vectors"])

    def train(self, **facts):
        return self.ask("train", self.sent, **facts)

    def curvature(self, **facts):
        return self.ask("query.curvature", {"weights": self.weights}, **facts)

    def hessian(self, vector=None, **facts):
        vector = self.weights if vector is None else vector
        return self.ask("query.hessian", {"weights": self.weights, "vector": vector}, **facts)

    @property
    def ledger(self):
        return json.loads((self.folder / "memory" / f"client-{self.client}.json").read_text())


@pytest.fixture
def spy(loopback, small, tmp_path):
    def made(*changes, policy="", client=2, data=None):
        return Spy(loopback, small(*changes), tmp_path / "client", policy, client, data)

    return made


def norm(vectors):
    return float(np.linalg.norm(vectors["delta"].numpy()))


# --------------------------------------------------------------------------------------------------------------------
# The recipe
# --------------------------------------------------------------------------------------------------------------------


def test_a_message_cannot_take_the_noise_away(spy):
    spy = spy(PRIVATE)
    plain = spy.train()[1]
    spied = spy.train(set="method=fedavg")[1]
    expected = 8.0 * 0.1 * spy.weights.numel() ** 0.5
    assert norm(plain) == pytest.approx(expected, rel=0.2)
    assert norm(spied) == pytest.approx(expected, rel=0.2)


def test_a_message_cannot_run_a_command(spy, tmp_path):
    mark = tmp_path / "was-here"
    facts, vectors = spy().train(set=f"model.name=os:system model.command='touch {mark}'")
    assert "refused" not in facts and "delta" in vectors
    assert not mark.exists()


def test_code_that_the_policy_does_not_name_is_never_imported(spy, tmp_path, monkeypatch):
    (tmp_path / "sly_net.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    client = spy()
    client.recipe = load(None, ["model=sly_net:Net"])
    client.grid.app = client_app(client.recipe)
    facts, vectors = client.train()
    assert facts["refused"] == "code: sly_net:Net is not part of fedflat, and this client's policy does not list it"
    assert not vectors and not (tmp_path / "was-here").exists()


def test_nor_is_a_part_of_a_method(spy):
    client = spy()
    client.recipe = load(None, ["method=os:system"])
    client.grid.app = client_app(client.recipe)
    assert client.train()[0]["refused"].startswith("code: os:system is not part of fedflat")


@pytest.mark.parametrize("change", ["task=os:system", "task=classification(loss=sly:Loss)", "data.name=sly_data:Set"])
def test_nor_is_a_task_or_a_data_set(spy, change):
    client = spy()
    client.recipe = load(None, [change])
    client.grid.app = client_app(client.recipe)
    named = change.partition("=")[2].removeprefix("classification(loss=").removesuffix(")")
    assert (
        client.train()[0]["refused"]
        == f"code: {named} is not part of fedflat, and this client's policy does not list it"
    )


def test_only_the_recipe_that_the_client_agreed_to_is_followed(spy, small):
    agreed = policies.digest(small())
    assert "refused" not in spy(policy=f'recipe = "sha256:{agreed}"').train()[0]
    refused = spy("local.lr=0.2", policy=f'recipe = "{agreed}"').train()[0]["refused"]
    assert refused.startswith("recipe: its digest is ") and agreed in refused


def test_a_server_with_another_recipe_is_told_so(spy, small):
    said = spy().ask("query", recipe=policies.digest(small("local.lr=0.2")))[0]["refused"]
    assert said.startswith("recipe: the server's differs from this client's")


def test_a_run_keeps_the_recipe_that_it_began_with(spy, small):
    assert "refused" not in spy().train()[0]
    assert spy("local.momentum=0.5").train()[0]["refused"] == "recipe: it is not the one that this run started with"


def test_what_the_server_alone_decides_is_not_in_the_digest(small):
    same = ["server.rounds=9", "server.cohort=2", "admission.quorum=2", "evaluation.every=0", "deployment.wait=9",
            "checkpoint.every=3", "engine.workers=2", "data.dir=/elsewhere"]  # fmt: skip
    other = [
        "local.epochs=7",
        'evaluation.measures=["proximal"]',
        "split.clients=5",
        "precision=float64",
        "seed=1",
        "task=regression",
    ]
    assert {policies.digest(small(change)) for change in same} == {policies.digest(small())}
    assert policies.digest(small()) not in {policies.digest(small(change)) for change in other}


def test_the_seed_is_none_of_the_clients_business_unless_it_rehearses(small):
    secret = "deployment.draws=secret"
    assert policies.digest(small(secret)) == policies.digest(small(secret, "seed=7"))


# --------------------------------------------------------------------------------------------------------------------
# Questions
# --------------------------------------------------------------------------------------------------------------------


def test_no_hessian_product_is_given_that_the_recipe_does_not_measure(spy):
    assert spy(policy="[answers]\nhessian = 99").hessian()[0]["refused"] == "hessian: the recipe does not measure it"


CURVATURE = 'evaluation.measures=["local_curvature"]'


@pytest.mark.parametrize("question", ["hessian", "curvature", "gradient", "rise", "margin"])
@pytest.mark.parametrize("method", [PRIVATE, 'method=central_dp(entropy="system")'])
def test_a_private_method_answers_no_unprotected_question(spy, question, method):
    client = spy(method, "evaluation.sharpness=1", CURVATURE, policy="[answers]\nhessian = 99\ncurvature = 99")
    vectors = {"weights": client.weights, "vector": client.weights}
    facts, answer = client.ask(f"query.{question}", vectors, samples=1, seed=0)
    assert facts["refused"] == f"{question}: a private method answers no question that its noise does not protect"
    assert not answer


def test_a_single_sample_cannot_be_asked_for(spy):
    """With a product over one sample of a linear model the server reads the sample off the answer."""
    measured = ["evaluation.sharpness=1", "evaluation.sharpness_samples=4", "model.hidden=[]"]
    client = spy(*measured, policy="[answers]\nhessian = 99")
    assert client.hessian(samples=1)[0]["refused"] == (
        "hessian: the answer would use only 1 samples, answers.min_samples = 10")  # fmt: skip
    enough = spy(*measured[:1], "evaluation.sharpness_samples=400", policy="[answers]\nhessian = 99")
    _, over_many = enough.hessian(samples=1, seed=5)
    _, as_the_recipe_says = enough.hessian()
    assert np.array_equal(over_many["answer"].numpy(), as_the_recipe_says["answer"].numpy())


def test_nor_is_an_update_sent_that_one_sample_has_made(spy):
    """One step over a batch of one: the update of a linear model is that sample, times a number for each class."""
    recipe = ["model.hidden=[]", "local.steps=1", "local.batch=1", "local.weight_decay=0.0"]
    client = spy(*recipe)
    told = "train: the answer would use only 1 samples, answers.min_samples = 10"
    assert client.train()[0]["refused"] == told
    careless = spy(*recipe, policy="[answers]\nmin_samples = 1")
    layout = careless.problem.network.layout
    by_name = {name: careless.train()[1]["delta"].numpy()[layout.slices[name]] for name in layout.shapes}
    weight, bias = (next(v for name, v in by_name.items() if name.endswith(end)) for end in ("weight", "bias"))
    read = weight.reshape(10, 64)[bias.argmax()] / bias.max()
    own = own_problem(careless.recipe, careless.client, 1437, None).federation
    samples = own.batch(own.shard(careless.client), None)[0].flatten(1).numpy()
    assert np.abs(samples - read).max(axis=1).min() < 1e-4, "the server has one of the client's images"


def test_a_client_with_too_few_samples_says_nothing(spy):
    client = spy(policy="[answers]\nmin_samples = 100000")
    for reply in client.train(), client.ask("query"):
        assert reply[0]["refused"].endswith("answers.min_samples = 100000") and not reply[1]


def test_answers_are_counted_over_all_runs_and_restarts(spy):
    policy = "[answers]\ntrain = 2\nmin_samples = 1"
    assert "refused" not in spy(policy=policy).train()[0]
    assert "refused" not in spy(policy=policy).train(run="f" * 16)[0]
    last = spy(policy=policy)
    facts, vectors = last.train(run="e" * 16)
    assert facts["refused"] == "train: 2 answers were given already, answers.train = 2" and not vectors
    assert last.ledger["answers"] == {"train": 2} and last.ledger["refused"] == {"train": 1}


def test_hessian_products_are_counted_too(spy):
    client = spy("evaluation.sharpness=1", "evaluation.sharpness_samples=0", policy="[answers]\nhessian = 1")
    assert "answer" in client.hessian()[1]
    assert client.hessian()[0]["refused"] == "hessian: 1 answers were given already, answers.hessian = 1"


def test_the_largest_eigenvalue_is_a_single_number_and_counted_too(spy):
    client = spy(CURVATURE, "evaluation.sharpness_samples=0", policy="[answers]\ncurvature = 1")
    assert client.curvature()[1]["answer"].shape == (1,)
    assert client.curvature()[0]["refused"] == "curvature: 1 answers were given already, answers.curvature = 1"
    assert client.ledger["answers"] == {"curvature": 1}


def test_nor_is_it_given_over_few_samples_or_where_the_recipe_does_not_measure_it(spy):
    allowed = "[answers]\ncurvature = 99"
    few = spy(CURVATURE, "evaluation.sharpness_samples=4", policy=allowed).curvature(samples=400)[0]["refused"]
    assert few == "curvature: the answer would use only 1 samples, answers.min_samples = 10"
    other = spy("evaluation.sharpness=1", policy=allowed)
    assert other.curvature()[0]["refused"] == "curvature: the recipe does not measure it"


def test_nor_at_weights_at_which_it_is_not_finite(spy):
    client = spy(CURVATURE, policy="[answers]\ncurvature = 5\nmin_samples = 1")
    client.weights = client.weights + 1e38
    facts, vectors = client.curvature()
    assert facts["refused"] == "curvature: λ₁ is not finite with the weights that were sent" and not vectors


def test_without_a_policy_strict_rules_hold(spy):
    client = spy("evaluation.sharpness=1", CURVATURE, policy=None)
    assert "refused" not in client.train(set="method=fedprox")[0]
    assert client.curvature()[0]["refused"] == "curvature: 0 answers were given already, answers.curvature = 0"
    assert client.hessian()[0]["refused"] == "hessian: 0 answers were given already, answers.hessian = 0"


# --------------------------------------------------------------------------------------------------------------------
# Privacy
# --------------------------------------------------------------------------------------------------------------------

LEAST = '[privacy]\npart = "local_dp"\nclip = 0.2\nnoise = 4.0\n'


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedavg", "this client requires local_dp, which the method does not have"),
        ('central_dp(entropy="system")', "this client requires local_dp"),
        ('local_dp(clip=0.1, noise=1.0, entropy="system")', "noise = 1 is below this client's minimum, 4"),
        ('local_dp(clip=9.0, noise=8.0, entropy="system")', "clip = 9 is above this client's maximum, 0.2"),
    ],
)
def test_less_privacy_than_the_client_insists_on_is_refused(spy, method, why):
    assert why in spy(f"method={method}", policy=LEAST).train()[0]["refused"]


def test_noise_from_a_seed_is_refused_by_the_client(loopback, small, tmp_path):
    recipe = small("method=local_dp(clip=0.1, noise=8.0)")
    (tmp_path / "policy.toml").write_text(LEAST)
    grid = loopback.InProcess(client_app(recipe), 4, policy=str(tmp_path / "policy.toml"))
    content = messages.content({}, {"recipe": policies.digest(recipe)})
    message = flwr.Message(content=content, dst_node_id=100, message_type="query")
    grid.push_messages([message])
    (reply,) = grid.pull_messages(["message-0"])
    assert "would follow from the recipe's seed" in messages.read_facts(reply.content)["refused"]


def test_the_budget_is_the_clients_own_and_outlives_runs(spy):
    """Each upload has noise z/2 = 4 in units of what it hides: 1/σ² = 1/16, and k of them have σ = 4/√k."""
    dp = pytest.importorskip("dp_accounting")
    allowed = dp.get_epsilon_gaussian(4 / 2**0.5, 1e-5)
    policy = f"{LEAST}epsilon = {allowed + 1e-6}\n"
    replies = [spy(PRIVATE, policy=policy).train(run=f"{run:016x}")[0] for run in range(3)]
    would = dp.get_epsilon_gaussian(4 / 3**0.5, 1e-5)
    assert ["refused" in reply for reply in replies] == [False, False, True]
    assert replies[-1]["refused"].startswith(f"train: this client's ε would reach {would:.3g}, privacy.epsilon = ")
    assert spy(PRIVATE, policy=policy).ledger["spent"] == pytest.approx(2 / 16)


def test_uploads_without_noise_have_no_place_in_a_budget(spy):
    assert "ε would reach inf" in spy(policy="[privacy]\nepsilon = 100.0").train()[0]["refused"]


def test_nor_has_noise_that_only_the_server_adds_unless_the_client_trusts_it(spy):
    """A server that names central_dp and adds no noise would otherwise get the bare updates within any budget."""
    pytest.importorskip("dp_accounting")
    central = 'method=central_dp(noise=8.0, entropy="system")'
    assert "ε would reach inf" in spy(central, policy="[privacy]\nepsilon = 100.0").train()[0]["refused"]
    trusting = '[privacy]\npart = "central_dp"\nepsilon = 100.0'
    assert "refused" not in spy(central, policy=trusting).train()[0]


@pytest.mark.parametrize("question", ["hessian", "curvature", "train"])
def test_a_server_cannot_reset_a_ledger_by_starting_another_run(loopback, small, tmp_path, question):
    """Without a directory the ledger is in Flower's state of one run: nothing is answered that it should limit."""
    pytest.importorskip("dp_accounting")
    measured = ["evaluation.sharpness=1", 'evaluation.measures=["local_curvature"]']
    recipe = small(*([PRIVATE] if question == "train" else measured))
    budget = f"{LEAST}epsilon = 50.0" if question == "train" else f"[answers]\n{question} = 1\nmin_samples = 1"
    for ledger, told in ("", True), ("ledger = 'ledger'\n", False):
        client = Spy(loopback, recipe, tmp_path / "client", ledger + budget, memory=False)
        facts, vectors = getattr(client, question)()
        assert (not vectors) == told
        assert ("no ledger outlives this run" in facts.get("refused", "")) == told


def test_a_protected_upload_brings_neither_loss_nor_notes(spy):
    for method, told in (PRIVATE, False), ("method=fedavg", True):
        facts, _ = spy(method, 'evaluation.measures=["proximal"]').train(run="a" * 15 + str(int(told)))
        assert bool(facts["loss"]) == told


def test_weights_that_overflow_on_a_clients_samples_tell_nothing_of_them(spy):
    """NaN stays NaN under any noise: where its update is not finite, the client sends noise alone."""
    client = spy(PRIVATE, "local.lr=1.0")
    client.sent = {name: vector + 1e38 for name, vector in client.sent.items()}
    delta = client.train()[1]["delta"].numpy()
    assert np.isfinite(delta).all()
    assert np.linalg.norm(delta) == pytest.approx(8.0 * 0.1 * client.weights.numel() ** 0.5, rel=0.2)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn"])
def test_weights_that_overflow_are_answered_by_one_sentence_and_no_vector(spy, method):
    """Nobody could use the update, and its memory is not worth keeping."""
    client = spy(f"method={method}", "local.lr=1.0")
    client.sent = {name: vector + 1e38 for name, vector in client.sent.items()}
    facts, vectors = client.train()
    assert facts["refused"] == "train: loss is not finite with the weights that were sent"
    assert facts["reason"] == "not finite" and not vectors
    assert client.ledger["refused"] == {"train": 1} and not [*client.folder.rglob("*.safetensors")]


def test_nor_is_a_hessian_product_sent_that_is_not_finite(spy):
    client = spy("evaluation.sharpness=1", policy="[answers]\nhessian = 5\nmin_samples = 1")
    client.weights = client.weights + 1e38
    facts, vectors = client.hessian()
    assert facts["refused"] == "hessian: the product is not finite with the weights that were sent"
    assert not vectors and client.ledger["answers"] == {"hessian": 1}


def test_the_digest_of_a_clients_memory_does_not_confirm_a_guess_of_it(loopback, small, tmp_path):
    """Whoever guesses all samples can compute the memory; its digest must not tell that the guess is right."""
    told = []
    for folder in "one", "other":
        client = Spy(loopback, small("method=scaffold"), tmp_path / folder)
        facts, vectors = client.train()
        told.append((facts["digest"], vectors["delta"].numpy().tobytes()))
    assert told[0][1] == told[1][1] and told[0][0] != told[1][0]


def test_an_error_on_the_client_does_not_quote_its_samples_to_the_server(spy):
    def patients(client):
        if client < 0:
            return federation.load("digits")
        raise ValueError("Jane Doe, born 1970, has no label")

    client = spy(data=patients)
    with pytest.raises(AssertionError) as failed:
        client.train()
    assert "Jane" not in str(failed.value) and "ValueError; its message is in the client's log" in str(failed.value)


@pytest.mark.parametrize("method", ['local_dp(clip=0.1, noise=0.0, entropy="system")', "central_dp(noise=0.0)"])
def test_a_part_without_noise_is_no_privacy(spy, method):
    part = method.partition("(")[0]
    refused = spy(f"method={method}", policy=f'[privacy]\npart = "{part}"').train()[0]["refused"]
    assert refused == "privacy: noise = 0 is below this client's minimum, 0"


def test_noise_without_a_part_is_a_mistake_and_not_ignored(tmp_path):
    (tmp_path / "policy.toml").write_text("[privacy]\nnoise = 8.0")
    with pytest.raises(policies.PolicyError, match="clip and noise need a part"):
        policies.read_policy(tmp_path / "policy.toml")


def test_the_ledger_is_private_and_a_damaged_one_allows_nothing(spy):
    client = spy("deployment.draws=secret")
    client.train()
    path = client.folder / "memory" / "client-2.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_suffix(".secret").stat().st_mode) == 0o600
    for damage in "", "{", '{"answers": {"train": -5}}', '{"spent": -1.0}', '{"spent": NaN}', "[]", '{"other": 1}':
        path.write_text(damage)
        facts, vectors = client.train()
        assert "the client's ledger is damaged" in facts["refused"] and not vectors


def test_a_ledger_that_other_users_could_take_away_allows_nothing(spy):
    """Who may write to its directory, or to the one above, resets every count by moving it away."""
    client = spy()
    memory = client.folder / "memory"
    assert "refused" not in client.train()[0]
    for place, mode in (memory, 0o707), (memory, 0o1777), (client.folder, 0o777), (memory / "client-2.json", 0o604):
        before = place.stat().st_mode
        place.chmod(mode)
        facts, vectors = client.train()
        assert (
            "must be accessible to this user only, but every user of this machine may" in facts["refused"]
            and not vectors
        )
        place.chmod(before)
    client.folder.chmod(0o1777)  # as /tmp: others can add to it, and take nothing away
    assert "refused" not in client.train()[0]


def test_a_server_cannot_fill_the_disk_by_ever_new_runs(spy, monkeypatch):
    """Every run has its memory, of the size of a model or two; the names of runs are the server's."""
    monkeypatch.setattr("fedflat.flower.shelf.OTHERS", 3)
    client = spy("method=scaffold")
    told = [client.train(run=f"{k:016x}")[0].get("refused", "") for k in range(6)]
    assert told[:3] == [""] * 3 and len({*told[3:]}) == 1
    assert told[3].startswith(
        "train: the memory of 3 other runs is stored here; delete the memory of runs that have ended"
    )
    assert len([*(client.folder / "memory").glob("*/client-2/*.safetensors")]) == 3
    assert client.ledger["answers"] == {"train": 3}
    assert "refused" not in client.train(run=f"{1:016x}")[0]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_a_secret_that_somebody_else_has_put_there_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "client-0.secret"
    known = tallies.own_secret(path)
    os.chown(path, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(policies.PolicyError, match="belongs to another user of this machine"):
        tallies.own_secret(path)
    os.chown(path, 1000, -1)
    assert tallies.own_secret(path) == known


# --------------------------------------------------------------------------------------------------------------------
# Fields of a message
# --------------------------------------------------------------------------------------------------------------------

FORGED = {
    "a run that leads elsewhere": {"run": "../../etc/passwd0"},
    "no run": {"run": 7},
    "a negative round": {"round": -1},
    "a round beyond reason": {"round": 2**62},
    "a round of words": {"round": "one"},
    "a round that is true": {"round": True},
    "no learning rate": {"lr": "big"},
    "a learning rate that is not the recipe's": {"lr": 1e30},
    "a learning rate that is not a number": {"lr": float("nan")},
    "a federation smaller than this client": {"everyone": 1},
    "a federation beyond reason": {"everyone": 2**62},
    "a memory of the future": {"kept_round": 5, "kept_digest": "0" * 64},
    "a memory by a path": {"kept_round": 0, "kept_digest": "/etc/passwd"},
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_field_out_of_its_range_is_refused(spy, forged):
    facts, vectors = spy().train(**FORGED[forged])
    assert facts["refused"].startswith("train: ") and not vectors


def spoil(sent, name):
    vector = sent["weights"]
    bad = vector.clone()
    bad[3] = float("nan")
    return {
        "missing": {},
        "of another shape": {"weights": vector[:-1]},
        "of another precision": {"weights": vector.double()},
        "not finite": {"weights": bad},
        "with another": {"weights": vector, "more": vector},
        "oversized": {"weights": vector.repeat(50)},
    }[name]


@pytest.mark.parametrize(
    "fault", ["missing", "of another shape", "of another precision", "not finite", "with another", "oversized"]
)
def test_vectors_that_are_not_the_broadcasts_are_refused(spy, fault):
    client = spy()
    facts, vectors = client.ask("train", spoil(client.sent, fault))
    assert facts["refused"].startswith("train: ") and not vectors


# --------------------------------------------------------------------------------------------------------------------
# What the server sees of it
# --------------------------------------------------------------------------------------------------------------------


def test_a_refusal_is_counted_by_the_server_and_logged_by_the_client(deployed, small, tmp_path, capsys):
    recipe = small("server.cohort=4")
    limit = "[answers]\ntrain = 2\nmin_samples = 1"
    _, records = deployed(recipe, policy=limit, memory=str(tmp_path / "memory"))
    refused = records[-1]["refused"]
    assert [(r["client"], r["reason"]) for r in refused] == [(client, "policy") for client in range(4)]
    assert refused[0]["detail"] == "train: 2 answers were given already, answers.train = 2"
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["refused"] == {"policy": 4}
    assert capsys.readouterr().out.count("refused: train: 2 answers were given already, answers.train = 2\n") == 4


def test_a_client_whose_training_diverges_is_refused_by_that_reason_as_in_a_simulation(deployed, small):
    with pytest.raises(
        TrainingError, match="client 0 in round 0: not finite: train: loss is not finite with the weights"
    ):
        deployed(small("local.lr=1e38", "local.steps=4", "admission.patience=1"))


def test_a_client_cannot_invent_a_reason():
    assert messages.read_refusal({"refused": "no\x1b[2J", "reason": "x" * 10**6}) == ("policy", "no\ufffd[2J")
    assert messages.read_refusal({"refused": "no", "reason": "not finite"}) == ("not finite", "no")
    assert messages.read_refusal({"reason": "not finite"}) is None


def test_refused_sharpness_is_null_with_the_reason(deployed, small):
    measured = small("server.rounds=1", "evaluation.sharpness=1")
    _, (record,) = deployed(measured, policy="[answers]\nmin_samples = 1")
    assert record["lambda1"] is None
    assert record["sharpness_missing"].endswith("refuses: hessian: 0 answers were given already, answers.hessian = 0")


def test_local_curvature_is_the_simulations_if_the_policy_allows_it(deployed, simulated, small):
    recipe = small('evaluation.measures=["consistency", "local_curvature"]', "evaluation.sharpness_samples=200")
    told = deployed(recipe, policy="ledger = 'ledger'\n[answers]\ncurvature = 12\nmin_samples = 10")
    assert told == simulated(recipe) and all(record["local_lambda1"] > 0 for record in told[1])


def test_where_the_policy_does_not_allow_it_local_curvature_is_null(deployed, small):
    _, records = deployed(small('evaluation.measures=["local_curvature"]', "server.rounds=1"))
    assert [(record["local_lambda1"], record["cohort"]) for record in records] == [(None, records[0]["cohort"])]


def test_a_policy_file_that_is_not_there_is_not_the_default(loopback, small, tmp_path):
    client = Spy(loopback, small(), tmp_path / "client")
    (client.folder / "policy.toml").unlink()
    assert "the client's policy cannot be read" in client.train()[0]["refused"]


@pytest.mark.parametrize("text", ["[answers]\ntrain = -1", "[answer]\ntrain = 1", "code = 'os'", "= 3", "a = " * 9])
def test_a_mistake_in_a_policy_is_one_sentence(tmp_path, text):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(policies.PolicyError, match=r"policy.toml: "):
        policies.read_policy(tmp_path / "policy.toml")


def test_the_policy_that_init_writes_agrees_with_its_recipe(tmp_path, small):
    project = pytest.importorskip("fedflat.flower.project")
    project.write_app(tmp_path / "wards", small("evaluation.sharpness=2"))
    recipe = load(tmp_path / "wards" / "wards" / "recipe.toml")
    found = policies.read_policy(tmp_path / "wards" / "policy.toml")
    assert found.recipe == f"sha256:{policies.digest(recipe)}"
    assert found.answers.train >= recipe.server.rounds and found.answers.hessian > 0 and found.answers.curvature == 0
    assert tomllib.loads((tmp_path / "wards" / "policy.toml").read_text())["privacy"]["part"] == "none"
