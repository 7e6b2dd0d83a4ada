"""What a recipe can have measured of a round beside the accuracy: local models, classes, FedSoL's angle."""

import copy
import hashlib
import math
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import vector_to_parameters

from fedflat import Method, Part, Samples, federate, models, train
from fedflat.engine.inline import Inline
from fedflat.engine.pool import Pool
from fedflat.errors import RecipeError
from fedflat.federation import take_normalised
from fedflat.flatness import Hessian, Objective, Portion, top_eigenvalues
from fedflat.flatness.federated import Gradient, Rise, TopEigenvalue
from fedflat.methods.parser import parse
from fedflat.methods.parts import ProximalAscent
from fedflat.models.vector import Network
from fedflat.recipe import Evaluation, Local, Server
from fedflat.rounds.metrics import proximal_loss
from fedflat.rounds.server import conduct, first_state, view
from fedflat.rounds.setup import Broadcast, Problem

ALL = [
    "consistency", "divergence", "discord", "cosine", "proximal", "lambda", "local", "classes", "gradient", "margin",
    "local_sharpness", "local_curvature",
]  # fmt: skip
COHORT = [0, 2, 3, 5, 7]


def mlp():
    return models.build("mlp", (1, 8, 8), 10, hidden=(12,))


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def problem_of(federation, module, method="fedavg", **settings):
    local = Local(batch=0, epochs=3, lr=0.3)
    return Problem.of(federation, Network(copy.deepcopy(module)), parse(method), local, **settings)


def accuracy_of(problem, weights, buffers, part):
    """The share of right answers, by a module of its own."""
    module = copy.deepcopy(problem.network.module)
    network = Network(module)
    network.weights.copy_(weights)
    network.buffers.copy_(buffers)
    inputs, labels = problem.federation.held_out(part, 0, problem.federation.size(part))
    with torch.no_grad():
        return float((module.eval()(inputs).argmax(dim=1) == labels).double().mean())


@pytest.mark.parametrize("part", ["test", "train"])
@pytest.mark.parametrize(
    ("build", "method", "policy"),
    [
        (mlp, "fedavg", "average"),
        (mlp, "fedsol", "average"),
        (mlp, "fednsam", "average"),
        (mlp, "scaffold", "average"),
        (normalised, "feddyn", "average"),
        (normalised, "fedavg", "local"),
    ],
)
def test_local_accuracy_is_that_of_the_sent_model_plus_each_clients_move(digits, build, method, policy, part):
    problem, again = (problem_of(digits, build(), method, buffers=policy) for _ in range(2))
    state = first_state(problem)
    with closing(Inline(problem)) as engine, closing(Inline(again)) as twin:
        for cohort in ([1, 4, 6], COHORT):
            sent = problem.method.broadcast(view(problem, state))
            shared = {"buffers": state.buffers} if state.buffers.numel() and policy == "average" else {}
            broadcast = Broadcast(state.round, 0.3, sent | shared)
            uploads = sorted(twin.local_rounds(broadcast, cohort), key=lambda upload: upload.client)
            twin.remember(uploads)
            kept = [twin.kept(upload.client) if policy == "local" else upload.vectors for upload in uploads]
            buffers = [vectors.get("buffers", state.buffers) for vectors in kept]
            ends = [
                accuracy_of(problem, sent["weights"] + upload.delta, own, part)
                for upload, own in zip(uploads, buffers, strict=True)
            ]
            before = accuracy_of(problem, sent["weights"], state.buffers, part)
            watch = Evaluation(on=part, batch=100, measures=["local"])
            state, report = conduct(problem, state, engine, cohort, Server(average="uniform"), watch)
            mean = sum(ends) / len(ends)
            assert report.measures == pytest.approx(
                {
                    "local_accuracy_before": before,
                    "local_accuracy": mean,
                    "local_accuracy_std": math.sqrt(sum((end - mean) ** 2 for end in ends) / len(ends)),
                },
                rel=1e-12,
            )
            assert len(set(ends)) > 1


def test_a_single_client_has_no_spread(digits):
    problem = problem_of(digits, mlp())
    with closing(Inline(problem)) as engine:
        watch = Evaluation(measures=["local", "divergence"])
        _, report = conduct(problem, first_state(problem), engine, [3], watch=watch)
    assert report.measures["local_accuracy_std"] == 0.0
    assert report.measures["divergence"] > 0.0


def test_local_accuracies_are_the_same_on_the_pool(digits):
    reports = []
    for start in (lambda p, s: Inline(p), lambda p, s: Pool(p, s, slots=5, workers=2)):
        problem = problem_of(digits, normalised(), "feddyn")
        state = first_state(problem)
        with closing(start(problem, state)) as engine:
            for cohort in ([1, 4, 6], COHORT):
                state, report = conduct(problem, state, engine, cohort, watch=Evaluation(measures=["local"]))
        reports.append(report.measures)
    assert reports[0] == reports[1]


def test_what_is_sent_ahead_of_the_global_model_is_where_the_clients_begin(digits):
    """FedNSAM sends w + β m: its clients' accuracy before training is not that of the last evaluated model."""
    result = train(digits, mlp(), "fednsam", rounds=3, cohort=5, engine="inline", measures=["local"])
    begun = [record["local_accuracy_before"] for record in result.history]
    assert begun[2] != result.history[1]["accuracy"]
    plain = train(digits, mlp(), "fedavg", rounds=3, cohort=5, engine="inline", measures=["local"])
    begun = [record["local_accuracy_before"] for record in plain.history]
    assert begun[1:] == [record["accuracy"] for record in plain.history[:-1]]


@pytest.mark.parametrize("on", ["test", "train"])
def test_class_accuracies_weighted_by_the_classes_sizes_are_the_accuracy(digits, on):
    result = train(digits, rounds=4, engine="inline", every=2, on=on, batch=99, measures=["classes"])
    assert [record["round"] for record in result.history if "class_accuracy" in record] == [2, 4]
    counts = torch.bincount(getattr(digits.dataset, on).labels, minlength=10).double()
    for record in result.history[1::2]:
        of_classes = torch.tensor(record["class_accuracy"], dtype=torch.float64)
        assert float(of_classes @ counts / counts.sum()) == pytest.approx(record["accuracy"], rel=1e-12)
    samples = getattr(digits.dataset, on)
    labels, right = samples.labels, result.model(samples.inputs).argmax(dim=1) == samples.labels
    assert record["class_accuracy"] == pytest.approx([float(right[labels == c].double().mean()) for c in range(10)])


def test_a_class_that_nobody_is_tested_on_has_no_accuracy(digits):
    test = digits.dataset.test
    chosen = test.labels != 4
    dataset = replace(digits.dataset, test=Samples(test.inputs[chosen], test.labels[chosen]))
    result = train(replace(digits, dataset=dataset), rounds=1, engine="inline", measures=["classes"])
    (found,) = (record["class_accuracy"] for record in result.history)
    assert [c for c, accuracy in enumerate(found) if accuracy is None] == [4]


@pytest.mark.parametrize("scope", ["all", "head", "body"])
def test_fedsol_notes_its_angle_in_every_round(digits, scope):
    method = f"fedsol(radius='fixed', scope='{scope}')"
    result = train(digits, mlp(), method, rounds=3, cohort=4, engine="inline", measures=["cosine"])
    assert all(-1.0 <= record["notes"]["cosine"] <= 1.0 for record in result.history)
    assert any(record["notes"]["cosine"] for record in result.history)
    silent = train(digits, mlp(), method, rounds=1, cohort=4, engine="inline")
    assert "notes" not in silent.history[0]


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedprox", "fedntd"])
def test_other_methods_have_no_proximal_gradient_and_no_angle(digits, method):
    result = train(digits, mlp(), method, rounds=1, cohort=4, engine="inline", measures=ALL)
    assert "cosine" not in result.history[0]
    assert {"consistency", "divergence", "discord", "local_accuracy", "class_accuracy"} <= set(result.history[0])
    assert {"gradient", "margin", "local_sharpness", "averaged_sharpness", "global_sharpness"} <= set(result.history[0])


@dataclass(frozen=True)
class Push(Part):
    """A proximal loss whose gradient is known: p · w."""

    direction: tuple[float, ...] = ()

    def plan(self, rule, sent, memory):
        return replace(rule, pull=torch.tensor(self.direction, dtype=torch.float64))


def half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * (outputs - labels).square().mean()


def chain():
    """x ↦ b · (A x), two linear layers without biases: body A (2 × 3) and head b (1 × 2)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).double()


def by_hand(x, y, weights, offset):
    """∇ of the mean of ½ (b A x − y)² at w + ε."""
    there = weights + offset
    body, head = there[:6].view(2, 3), there[6:].view(1, 2)
    errors = x @ body.T @ head.T - y
    slope_head = (errors * (x @ body.T)).mean(dim=0)
    slope_body = head.T @ (errors * x).mean(dim=0, keepdim=True)
    return torch.cat([slope_body.reshape(-1), slope_head])


SCOPES = {"all": slice(0, 8), "body": slice(0, 6), "head": slice(6, 8)}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_angle_of_one_step_is_that_of_update_and_proximal_gradient_within_the_scope(regression, scope):
    push = (0.5, -1.0, 2.0, 0.3, -0.7, 1.1, 0.9, -0.4)
    method = Method(ProximalAscent(Push(push), rho=0.5, radius="fixed", scope=scope))
    problem = Problem.of(
        regression,
        Network(chain(), torch.float64),
        method,
        Local(batch=0, steps=1, lr=0.01),
        loss=half_square,
        shuffle=False,
        measures=["cosine"],
    )
    state, span = first_state(problem), SCOPES[scope]
    p, expected = torch.tensor(push, dtype=torch.float64), []
    for client in (0, 2):
        x, y = regression.batch(regression.shards[client], None)
        epsilon = torch.zeros(8, dtype=torch.float64)
        epsilon[span] = 0.5 * p[span] / p[span].norm()
        g = by_hand(x, y, state.weights, epsilon)
        expected.append(float(g[span] @ p[span] / (g[span].norm() * p[span].norm())))
    with closing(Inline(problem)) as engine:
        _, report = conduct(problem, state, engine, [0, 2], Server(average="uniform"))
    assert report.notes["cosine"] == pytest.approx(sum(expected) / 2, rel=1e-10)


@pytest.mark.parametrize("radius", ["layer", "dim0"])
def test_lambda_is_the_mean_entry_of_the_perturbations_shape_by_layer(digits, radius):
    problem = problem_of(digits, mlp(), f"fedsol(rho=0.5, radius='{radius}')", measures=["lambda"])
    recipe = problem.recipe.model_copy(update={"local": Local(batch=0, steps=2, lr=0.3)})
    problem = replace(problem, recipe=recipe)
    state = first_state(problem)
    with closing(Inline(problem)) as engine:
        (upload,) = engine.local_rounds(Broadcast(0, 0.3, {"weights": state.weights}), [2])
    # Only the second step has a shape, that of the first step's move: a plain gradient on all of the client's samples.
    module = mlp()
    vector_to_parameters(state.weights, module.parameters())
    inputs, labels = digits.batch(digits.shard(2), None)
    F.cross_entropy(module(inputs), labels).backward()
    expected: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        moved = parameter.grad.abs()
        norm = moved.norm(dim=0, keepdim=True) if radius == "dim0" else moved.norm()
        expected.setdefault(name.split(".")[0], []).append((moved / norm.clamp_min(1e-12)).flatten())
    noted = {name: value for name, value in upload.notes.items() if name.startswith("lambda/")}
    means = {f"lambda/{layer}": float(torch.cat(parts).mean()) for layer, parts in expected.items()}
    assert noted == pytest.approx(means, rel=1e-4)


@pytest.mark.parametrize(("measures", "noted"), [([], set()), (["cosine"], {"cosine"}), (["lambda"], {"lambda"})])
def test_fedsol_notes_what_is_measured_and_no_more(digits, measures, noted):
    problem = problem_of(digits, mlp(), "fedsol(rho=0.5)", measures=measures)
    with closing(Inline(problem)) as engine:
        (upload,) = engine.local_rounds(Broadcast(0, 0.3, {"weights": first_state(problem).weights}), [2])
    assert {name.split("/")[0] for name in upload.notes} == noted


def test_the_proximal_loss_of_a_text_is_the_mean_over_its_tokens_that_count():
    """Two batches of texts of different lengths; some labels do not count. The oracle takes each text alone."""
    texts = [torch.arange(length) % 5 for length in (3, 6, 2, 5)]
    labels = [(text + 1) % 5 for text in texts]
    labels[1][2] = -100
    network = Network(models.build("gpt", (6,), 5, vocabulary=5, per_token=True, width=8, heads=2, layers=1))
    start = network.weights.clone()
    end = start + 0.3 * torch.randn(len(start), generator=torch.Generator().manual_seed(0))

    def padded(rows, fill):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    batches = [(padded(texts[i : i + 2], -1), padded(labels[i : i + 2], -100)) for i in (0, 2)]
    found, each = proximal_loss(network, start, end, batches), []
    for text, label in zip(texts, labels, strict=True):
        answers = []
        for weights in (start, end):
            network.load(weights)
            answers.append((network.module(text[None])[0].detach() / 3).softmax(dim=1)[label != -100])
        p, q = answers
        each += (p * (p / q).log()).sum(dim=1).tolist()
    assert found == pytest.approx(sum(each) / len(each), rel=1e-4) and found > 1e-3


def test_the_proximal_loss_needs_classes():
    values = federate(torch.rand(20, 3), torch.rand(20), split="iid", clients=2)
    with pytest.raises(RecipeError, match=r"evaluation\.measures: proximal compares probabilities of classes"):
        train(values, rounds=1, measures=["proximal"])


@pytest.mark.parametrize("together", [1, 2])
def test_the_proximal_loss_is_the_divergence_of_the_answers_on_the_clients_own_samples(digits, together):
    problem = problem_of(digits, mlp(), measures=["proximal"], group=together)
    state = first_state(problem)
    with closing(Inline(problem)) as engine:
        uploads = [*engine.local_rounds(Broadcast(0, 0.3, {"weights": state.weights}), [0, 2])]
    for upload in uploads:
        inputs, _ = digits.batch(digits.shard(upload.client), None)
        before, after = mlp().double(), mlp().double()
        vector_to_parameters(state.weights.double(), before.parameters())
        vector_to_parameters((state.weights + upload.delta).double(), after.parameters())
        p, q = ((module(inputs.double()).detach() / 3).softmax(dim=1) for module in (before, after))
        expected = float((p * (p / q).log()).sum(dim=1).mean())
        assert upload.notes["proximal_loss"] == pytest.approx(expected, rel=1e-3)
        assert expected > 1e-3


def test_an_unknown_measure_is_named(digits):
    with pytest.raises(RecipeError, match=r"evaluation.measures.*cosinus"):
        train(digits, rounds=1, measures=["cosinus"])


def fingerprint(result):
    """Of the weights and batch statistics; the integer buffers are counters of one client's round."""
    floats = [tensor for tensor in result.model.state_dict().values() if tensor.is_floating_point()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in floats)).hexdigest()


@pytest.mark.parametrize(
    ("build", "method"),
    [(mlp, "fedavg"), (mlp, "fedsol"), (mlp, "fedsol(scope='head') + man(0.1)"), (normalised, "feddyn")],
)
def test_measures_do_not_change_a_bit_of_what_is_trained(digits, build, method):
    settings = dict(rounds=2, cohort=4, batch=0, epochs=2, momentum=0.5)
    runs = [
        train(digits, build(), method, **settings, measures=measures, engine=engine)
        for measures, engine in (([], "inline"), (ALL, "inline"), (ALL, "pool"))
    ]
    assert len({fingerprint(run) for run in runs}) == 1
    for name in ("accuracy", "loss", "local_loss", "bytes_up"):
        assert len({str(run.curve(name)) for run in runs}) == 1


@pytest.mark.parametrize(("build", "method"), [(mlp, "fedsam"), (mlp, "swa(start=2)"), (normalised, "feddyn")])
def test_the_sharpness_is_the_top_eigenvalue_of_the_pooled_samples_at_the_shown_weights(digits, build, method):
    settings = dict(rounds=4, cohort=5, lr=0.3, seed=3, sharpness=2, sharpness_samples=300)
    result = train(digits, build(), method, engine="inline", **settings)
    batches = Portion(300, seed=3).batches(digits, range(digits.clients))
    objective = Objective(take_normalised(result.model), F.cross_entropy, batches)
    (value,) = top_eigenvalues(Hessian(objective), k=1, tolerance=1e-6).values
    assert [round for round, _ in result.curve("lambda1")] == [2, 4]
    assert result.history[-1]["lambda1"] == pytest.approx(float(value), rel=1e-3)


def test_for_least_squares_the_sharpness_is_that_of_all_inputs_in_every_round(regression):
    settings = dict(rounds=3, lr=0.01, precision="float64", engine="inline", sharpness=1, sharpness_samples=0)
    result = train(regression, nn.Linear(3, 1, bias=False), loss=half_square, **settings)
    x = regression.dataset.train.inputs
    expected = float(torch.linalg.eigvalsh(x.T @ x / 80)[-1])
    assert [value for _, value in result.curve("lambda1")] == pytest.approx([expected] * 3, rel=1e-3)
    clients, vector = 4, 3 * 8
    products = [crossed / (2 * clients * vector) for _, crossed in result.curve("sharpness_bytes")]
    assert all(count == int(count) > 1 for count in products)


@pytest.mark.parametrize(("build", "method"), [(mlp, "fedsol"), (normalised, "feddyn")])
def test_sharpness_does_not_depend_on_engine_or_workers_nor_change_a_bit_of_the_training(digits, build, method):
    settings = dict(rounds=2, cohort=4, momentum=0.5)
    plain = train(digits, build(), method, engine="inline", **settings)
    assert not any("lambda1" in record for record in plain.history)
    engines = (dict(engine="inline"), dict(engine="pool", workers=1), dict(engine="pool", workers=2))
    runs = [train(digits, build(), method, sharpness=2, sharpness_samples=50, **settings, **each) for each in engines]
    assert len({str(run.curve("lambda1")) for run in runs}) == 1
    assert {fingerprint(run) for run in runs} == {fingerprint(plain)}
    assert len({str(run.curve("accuracy")) for run in [plain, *runs]}) == 1


def test_a_curvature_beyond_all_numbers_has_no_eigenvalue_rather_than_zero():
    x = torch.full((2, 3), 1e25)
    steep = Objective(nn.Linear(3, 1, bias=False), half_square, [(x, x[:, :1])])
    assert math.isnan(float(top_eigenvalues(Hessian(steep), k=1).values))


def training_loss(problem, buffers, client):
    """The mean loss of one client's training samples as a function of the weights."""
    federation, network = problem.federation, problem.network
    x, y = federation.batch(federation.shards[client], None)
    views = network.buffer_layout.views(buffers.clone()) if buffers.numel() else {}

    def loss(w):
        network.module.eval()
        return problem.loss(functional_call(network.module, {**network.layout.views(w), **views}, (x,)), y)

    return loss


def sharpness_of(loss, weights, rho):
    g = torch.func.grad(loss)(weights)
    return float(loss(weights + rho * g / g.norm()) - loss(weights))


@pytest.mark.parametrize("build", [mlp, normalised])
def test_the_gradient_is_that_of_the_mean_loss_of_all_training_samples(digits, build):
    settings = dict(rounds=4, cohort=5, lr=0.3, precision="float64", every=2, measures=["gradient"])
    result = train(digits, build(), "feddyn", engine="inline", **settings)
    assert [round for round, _ in result.curve("gradient")] == [2, 4]
    (x, y), (w, views) = (digits.dataset.train.inputs, digits.dataset.train.labels), parameters_of(result.model)
    dense = torch.func.grad(lambda w: F.cross_entropy(functional_call(result.model, views(w), (x,)), y))(w)
    assert result.history[-1]["gradient"] == pytest.approx(float(dense @ dense), rel=1e-10)


def parameters_of(module):
    own = {n: p.detach() for n, p in module.named_parameters()}
    sizes = [p.numel() for p in own.values()]

    def views(w):
        return {n: v.view_as(own[n]) for n, v in zip(own, w.split(sizes), strict=True)}

    return torch.cat([p.reshape(-1) for p in own.values()]), views


def test_for_least_squares_the_gradient_is_in_closed_form_whatever_the_clients_sizes(regression):
    federation = replace(regression, shards=tuple(torch.arange(80).split([2, 13, 30, 35])))
    settings = dict(rounds=2, lr=0.01, precision="float64", engine="inline", measures=["gradient", "margin"])
    result = train(federation, nn.Linear(3, 1, bias=False), loss=half_square, **settings)
    x, y = federation.dataset.train.inputs, federation.dataset.train.labels
    expected = x.T @ (x @ result.model.weight.detach().T - y) / 80
    assert result.history[-1]["gradient"] == pytest.approx(float(expected.square().sum()), rel=1e-10)
    assert result.history[-1]["margin"] is None  # these labels are not classes


@pytest.mark.parametrize("gamma", [0.0, 1.0, 3.5])
def test_the_margin_loss_is_the_share_of_training_samples_within_the_margin(digits, gamma):
    settings = dict(rounds=3, cohort=5, lr=0.3, every=3, on="train", margin=gamma, measures=["margin"])
    result = train(digits, mlp(), engine="inline", **settings)
    assert [round for round, _ in result.curve("margin")] == [3]
    x, y = digits.dataset.train.inputs, digits.dataset.train.labels
    with torch.no_grad():
        logits = result.model(x)
    margins = [float(z[c] - max(z[j] for j in range(10) if j != c)) for z, c in zip(logits, y.tolist(), strict=True)]
    assert result.history[-1]["margin"] == pytest.approx(sum(m <= gamma for m in margins) / len(margins), abs=1e-12)
    if gamma == 0:
        assert result.history[-1]["margin"] == pytest.approx(1 - result.history[-1]["accuracy"])


@pytest.mark.parametrize(
    ("build", "method", "policy"),
    [(mlp, "fedavg", "average"), (mlp, "fednsam", "average"), (normalised, "fedavg", "local")],
)
def test_local_averaged_and_global_sharpness_are_their_formulas(digits, build, method, policy):
    federation, rho = digits.to(torch.float64), 0.1
    watch = Evaluation(measures=["local_sharpness"], radius=rho)
    problem, again = (
        Problem.of(federation, Network(build(), torch.float64), parse(method), Local(batch=0, epochs=3, lr=0.3),
                   buffers=policy) for _ in range(2)
    )  # fmt: skip
    state = first_state(problem)
    questions = {"gradient": Gradient(), "rise": Rise()}
    with closing(Inline(problem, questions)) as engine, closing(Inline(again)) as twin:
        sent = problem.method.broadcast(view(problem, state))
        uploads = sorted(twin.local_rounds(Broadcast(0, 0.3, sent), COHORT), key=lambda upload: upload.client)
        state, report = conduct(problem, state, engine, COHORT, Server(average="uniform"), watch)
    first = first_state(again)
    own = [
        sharpness_of(
            training_loss(again, twin.kept(upload.client).get("buffers", first.buffers), upload.client),
            sent["weights"] + upload.delta,
            rho,
        )
        for upload in uploads
    ]
    losses = [training_loss(again, state.buffers, client) for client in COHORT]
    expected = {
        "local_sharpness": sum(own) / 5,
        "averaged_sharpness": sum(sharpness_of(loss, state.weights, rho) for loss in losses) / 5,
        "global_sharpness": sharpness_of(lambda w: sum(loss(w) for loss in losses) / 5, state.weights, rho),
    }
    assert report.measures == pytest.approx(expected, rel=1e-9)
    assert report.measures["averaged_sharpness"] > report.measures["global_sharpness"]


def tiny(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 3), *middle, nn.Tanh(), nn.Linear(3, 10))


@pytest.mark.parametrize(("build", "method"), [(tiny, "fedsam(0.1)"), (lambda: tiny(nn.BatchNorm1d(3)), "fedavg")])
def test_local_and_averaged_curvature_are_those_of_dense_hessians(digits, build, method):
    federation, portion = digits.to(torch.float64), Portion(0)
    watch = Evaluation(measures=["local_curvature"])
    problem, again = (
        Problem.of(federation, Network(build(), torch.float64), parse(method), Local(batch=0, epochs=3, lr=0.3))
        for _ in range(2)
    )
    state = first_state(problem)
    questions = {"curvature": TopEigenvalue(portion, tolerance=1e-9)}
    with closing(Inline(problem, questions)) as engine, closing(Inline(again)) as twin:
        sent = problem.method.broadcast(view(problem, state))
        sent |= {"buffers": state.buffers} if state.buffers.numel() else {}
        uploads = list(twin.local_rounds(Broadcast(0, 0.3, sent), COHORT[:2]))
        state, report = conduct(problem, state, engine, COHORT[:2], None, watch)

    def top(client, weights, buffers):
        loss = training_loss(again, buffers, client)
        return float(torch.linalg.eigvalsh(torch.func.hessian(loss)(weights))[-1])

    first = first_state(again).buffers
    own = [(u.client, sent["weights"] + u.delta, u.vectors.get("buffers", first)) for u in uploads]
    expected = {
        "local_lambda1": sum(top(*each) for each in own) / 2,
        "averaged_lambda1": sum(top(client, state.weights, state.buffers) for client, *_ in own) / 2,
        "flatness_distance": sum(float((weights - state.weights).norm()) for _, weights, _ in own) / 2,
    }
    assert report.measures == pytest.approx(expected, rel=1e-6)


def test_what_clients_are_asked_is_measured_where_the_round_is_evaluated_and_at_the_end(digits):
    result = train(digits, rounds=5, cohort=3, engine="inline", every=2, measures=ALL)
    for name in ("gradient", "margin", "local_sharpness", "global_sharpness", "local_lambda1", "flatness_distance"):
        assert [round for round, _ in result.curve(name)] == [2, 4, 5]


@pytest.mark.parametrize(("build", "method"), [(mlp, "fedsmoo"), (normalised, "fedavg")])
def test_what_clients_are_asked_is_the_same_to_the_bit_for_any_number_of_workers(digits, build, method):
    settings = dict(rounds=2, cohort=4, measures=ALL, sharpness=2, sharpness_samples=50)
    engines = (dict(engine="inline"), dict(engine="pool", workers=1), dict(engine="pool", workers=3))
    runs = [train(digits, build(), method, **settings, **each) for each in engines]
    for name in ("gradient", "margin", "local_sharpness", "averaged_sharpness", "global_sharpness", "lambda1"):
        assert len({str(run.curve(name)) for run in runs}) == 1
        assert runs[0].curve(name)
