"""Any module, data and loss: the numbers of an objective, one sentence for a mistake, and the module given back."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from fedflat import flatness
from fedflat.errors import DataError, FedflatError, RecipeError, TrainingError
from fedflat.flatness import Objective, batches_of, look, objective_of
from fedflat.flatness.dense import dense_hessian
from fedflat.flatness.samples import Fields
from fedflat.models import twice_differentiable

chance = torch.Generator().manual_seed(0)
X = torch.randn(24, 5, generator=chance, dtype=torch.float64)
Y = torch.arange(24) % 3


def network():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(Y)

    def __getitem__(self, k):
        return {"features": X[k].numpy(), "label": int(Y[k])}


class Endless(torch.utils.data.Dataset):
    def __getitem__(self, k):
        return X[k], int(Y[k])


FORMS = {
    "tensors": (X, Y),
    "list of two tensors": [X, Y],
    "numpy": (X.numpy(), Y.numpy()),
    "numpy backwards": tuple(np.ascontiguousarray(each.numpy()[::-1])[::-1] for each in (X, Y)),
    "numpy in int32": (X.numpy(), Y.numpy().astype(np.int32)),
    "batches": [(X[:7], Y[:7]), (X[7:], Y[7:])],
    "one batch": [(X, Y)],
    "generator": ((X[k : k + 6], Y[k : k + 6]) for k in range(0, 24, 6)),
    "dataset": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=9),
    "shuffled loader": DataLoader(TensorDataset(X, Y), batch_size=9, shuffle=True),
    "own sampler": DataLoader(TensorDataset(X, Y), batch_size=9, sampler=SubsetRandomSampler(range(24))),
    "loader with its own collate": DataLoader(
        TensorDataset(Y, X),
        batch_size=9,
        collate_fn=lambda rows: [torch.stack([row[k] for row in rows]) for k in (1, 0)],
    ),
    "loader of batches": DataLoader([(X[:7], Y[:7]), (X[7:], Y[7:])], batch_size=None),
    "single samples": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "single samples with tensors as labels": list(zip(X, Y, strict=True)),
    "single samples as dictionaries": [{"x": x, "y": int(y)} for x, y in zip(X, Y, strict=True)],
    "dictionary": {"x": X, "y": Y},
    "dictionary with the labels first": {"y": Y, "x": X},
    "batches of dictionaries": [{"pixel_values": X[:9], "labels": Y[:9]}, {"pixel_values": X[9:], "labels": Y[9:]}],
    "batches with a number beside the labels": [{"x": X, "labels": Y, "epoch": 3}],
    "dataset of dictionaries": Rows(),
    "classes between weights and texts": [(X, torch.ones(24), Y, ["a"] * 24)],
}


@pytest.fixture(scope="module")
def expected():
    f = Objective(network(), F.cross_entropy, [(X, Y)])
    v = torch.linspace(-1, 1, f.size, dtype=torch.float64)
    return f.value(), f.gradient(), f.product(v), v


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_numbers_of_the_objective(form, expected):
    value, gradient, product, v = expected
    with objective_of(network(), FORMS[form]) as f:
        assert f.samples == 24
        assert f.value() == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(f.gradient(), gradient, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(f.product(v), product, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    ],
    ids=["sum", "none", "a function that sums"],
)
def test_a_sum_over_the_samples_becomes_their_mean(loss, expected):
    with objective_of(network(), (X, Y), loss, batch=7) as f:
        assert f.value() == pytest.approx(expected[0], rel=1e-12)
        torch.testing.assert_close(f.product(expected[3]), expected[2], rtol=1e-11, atol=1e-13)


WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
IGNORING = torch.where(torch.arange(24) < 7, -100, Y)  # the whole first batch of seven
CLASS_MEANS = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), Y),
    "weights and smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), Y),
    "ignored labels": (nn.CrossEntropyLoss(), IGNORING),
    "ignored by default": (None, IGNORING),
    "ignored by the function": (F.cross_entropy, IGNORING),
    "another sign": (nn.CrossEntropyLoss(ignore_index=2, weight=WEIGHTS), Y),
    "log-likelihood": (nn.NLLLoss(weight=WEIGHTS), Y),
}


@pytest.mark.parametrize("case", CLASS_MEANS)
def test_weights_of_classes_and_ignored_labels_count_as_in_one_batch(case):
    loss, labels = CLASS_MEANS[case]
    whole = Objective(network(), loss or F.cross_entropy, [(X, labels)])
    v = torch.linspace(-1, 1, whole.size, dtype=torch.float64)
    with objective_of(network(), [(X[k : k + 7], labels[k : k + 7]) for k in range(0, 24, 7)], loss) as f:
        assert f.value() == pytest.approx(whole.value(), rel=1e-12)
        torch.testing.assert_close(f.gradient(), whole.gradient(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(f.product(v), whole.product(v), rtol=1e-11, atol=1e-13)
        blocks = flatness.layers(f)
    for here, there in zip(blocks, flatness.layers(whole), strict=True):
        assert here.eigenvalues == pytest.approx(there.eigenvalues, rel=1e-2)
        assert here.eigenvalues[0] <= here.activity.bound == pytest.approx(there.activity.bound, rel=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_who_turned_gradients_off_gets_the_same_numbers(mode, expected):
    model = network()
    with mode(), objective_of(model, (X.clone(), Y.clone())) as f:
        torch.testing.assert_close(f.product(expected[3]), expected[2], rtol=1e-11, atol=1e-13)
        found = f.gradient()
    torch.testing.assert_close(found, expected[1], rtol=1e-12, atol=1e-13)
    with torch.inference_mode(), pytest.raises(RecipeError, match=r"0\.weight was made in torch\.inference_mode"):
        look(network(), (X, Y))


def test_default_losses_of_a_column_and_of_pixels():
    column, targets = nn.Linear(5, 1).double(), X[:, 0]
    error = (column(X).detach().squeeze(1) - targets).square().mean()
    with objective_of(column, (X, targets)) as f:
        assert f.value() == pytest.approx(float(error), rel=1e-12)
    pixels, images = nn.Conv2d(2, 3, 1).double(), X[:, :4].reshape(12, 2, 2, 2)
    classes = torch.arange(48).reshape(12, 2, 2) % 3
    with objective_of(pixels, (images, classes)) as f:
        assert f.value() == pytest.approx(float(F.cross_entropy(pixels(images).detach(), classes)), rel=1e-12)


def test_a_loss_that_is_neither_is_refused():
    with (
        pytest.raises(DataError, match="the same samples twice give 4 × the loss"),
        objective_of(network(), (X, Y), lambda z, y: z.sum().square()),
    ):
        pass


def test_real_labels_get_the_squared_error():
    targets = torch.randn(24, 3, generator=chance, dtype=torch.float64)
    with objective_of(network(), (X, targets.float())) as f:
        assert f.value() == pytest.approx(float(F.mse_loss(network()(X).detach(), targets)), rel=1e-6)


def test_samples_are_drawn_with_the_seed_whatever_the_order_of_the_loader():
    seen = []
    for seed in (0, 0, 1):
        loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
        seen.append(torch.cat([x for x, _ in batches_of(loader, samples=10, seed=seed)]))
    assert len(seen[0]) == 10 and torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert sum(len(y) for _, y in batches_of([(X[:7], Y[:7]), (X[7:], Y[7:])], samples=10)) == 10


def test_a_loader_says_how_large_a_batch_is_and_a_sampler_of_its_own_which_samples():
    order = [5, 3, 8, 1, 2]
    drawn = batches_of(DataLoader(TensorDataset(X, Y), batch_size=4), samples=10)
    assert [len(labels) for _, labels in drawn] == [4, 4, 2]
    chosen = batches_of(DataLoader(TensorDataset(X, Y), batch_size=4, sampler=order))
    assert [len(labels) for _, labels in chosen] == [4, 1]
    assert torch.equal(torch.cat([inputs for inputs, _ in chosen]), X[order])


def test_inputs_are_the_arrays_of_a_dictionary_but_for_the_labels():
    other = {"name": "train", "empty": "", "epoch": 3, "words": ["a"] * 24, "nothing": None}
    ((inputs, labels),) = batches_of(iter([{"x": X.tolist(), "labels": Y, **other}]))
    assert list(inputs) == ["x"] and torch.equal(inputs["x"], torch.tensor(X.tolist())) and torch.equal(labels, Y)


def test_a_model_without_names_gets_the_only_input_or_the_one_with_a_usual_name():
    model = network()  # its forward calls its argument "input"
    for fields, name in (({"unusual": X}, "unusual"), ({"weight": Y, "x": X}, "x"), ({"unusual": Y, "input": X}, None)):
        places, named = Fields(fields).arguments(model)
        assert (places, named) == (((X,), {}) if name else ((), {"input": X}))
    with pytest.raises(DataError, match="which of one, two the model takes is not clear"):
        Fields({"one": X, "two": X}).arguments(model)


def test_the_samples_of_a_federation_are_those_of_its_portion(digits):
    here, there = batches_of(digits, 100, seed=3), flatness.Portion(100, 3).batches(digits, range(digits.clients))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(here, there, strict=True))


MISTAKES = {
    "an empty list": [],
    "an empty dictionary": {},
    "numbers": [1.0, 2.0],
    "nothing in a list": [None],
    "samples of different sizes": [(torch.ones(k), 0) for k in (4, 5)],
    "samples with different entries": [{"x": X[0], "y": 1}, {"x": X[1]}],
    "a loader without a length": DataLoader(Endless(), batch_size=4),
    "labels alone": [{"labels": Y}],
    "an empty loader": DataLoader(TensorDataset(X[:0], Y[:0])),
    "nothing": None,
    "inputs alone": X,
    "a text": "data.csv",
    "different lengths": (X, Y[:5]),
    "an unclear tuple": [(X, Y, torch.arange(24))],
    "a mask that would be lost": [(X, torch.ones(24, 5), Y)],
    "a dictionary without labels": [{"x": X, "z": Y}],
    "two kinds of labels": [{"x": X, "y": Y, "label": Y}],
    "labels beyond the classes": (X, Y + 7),
    "another number of features": (X[:, :4], Y),
    "labels in two dimensions": (X, Y[:, None].repeat(1, 2)),
    "texts": [(["a"] * 24, Y)],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_data_is_one_sentence(mistake):
    model = network().train()
    with pytest.raises(DataError) as error:
        look(model, MISTAKES[mistake])
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert model.training


@pytest.mark.parametrize("nothing", [{}, [], (X[:0], Y[:0])])
def test_no_samples_are_named(nothing):
    with pytest.raises(DataError, match="there are no samples to measure on"):
        batches_of(nothing)


def test_single_samples_are_batched_before_collate_names_their_labels():
    rows = [{"row": x, "class": int(y)} for x, y in zip(X, Y, strict=True)]
    with objective_of(network(), rows, collate=lambda batch: (batch["row"], batch["class"])) as f:
        assert f.samples == 24


def test_collate_says_what_is_what():
    with objective_of(network(), [(X, Y, torch.arange(24))], collate=lambda b: (b[0], b[1])) as f:
        assert f.samples == 24
    with pytest.raises(DataError, match=r"collate must return \(inputs, labels\)"):
        batches_of([(X, Y)], collate=lambda b: b[0])


def test_weights_that_are_not_finite_and_wrong_models_are_named():
    broken = network()
    with torch.no_grad():
        broken[0].weight[0, 0] = float("nan")
    for function in (look, flatness.spectrum, flatness.landscape, flatness.sharpness):
        with pytest.raises(TrainingError, match=r"0\.weight has values that are not finite"):
            function(broken, (X, Y))
    with pytest.raises(TrainingError, match="not finite"):
        flatness.duality(broken, (X, Y), (X, Y))
    with pytest.raises(TrainingError, match="not finite"):
        flatness.compare([broken], (X, Y))
    with pytest.raises(TrainingError, match="samples have values"):
        look(network(), (X / 0, Y))
    with pytest.raises(RecipeError, match="model is a dict"):
        look({}, (X, Y))
    for coarse in (torch.float16, torch.bfloat16):
        with pytest.raises(RecipeError, match=r"0\.weight is b?float16, too coarse for second derivatives"):
            look(network().to(coarse), (X, Y))
    with pytest.raises(RecipeError, match="no parameter requires a gradient"):
        look(network().requires_grad_(False), (X, Y))

    class Random(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x))

    with pytest.raises(TrainingError, match="two passes differ"):
        look(Random(5, 3).double(), (X, Y))


class Counting(nn.Module):
    """Counts its passes in a buffer, also in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        self.body[2].eval()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.body(x)


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_given_back_as_it_was(fails):
    model = Counting()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [part.training for part in model.modules()]
    calls = []

    def loss(z, y):
        calls.append(1)
        if fails and len(calls) > 30:
            raise KeyboardInterrupt
        return F.cross_entropy(z, y)

    if fails:
        with pytest.raises(KeyboardInterrupt):
            flatness.landscape(model, (X, Y), loss, directions="random", points=9)
    else:
        look(model, (X, Y), loss, k=1, products=6)
    assert [part.training for part in model.modules()] == flags
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())


class Tagged(nn.Module):
    """A classifier in the style of Hugging Face: inputs by name, a record with logits."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, pixel_values, mask=None):
        return SimpleNamespace(logits=self.net(pixel_values if mask is None else pixel_values * mask))


def test_named_inputs_and_a_record_with_logits():
    mask = (torch.arange(5) != 2).double().expand(24, 5)
    with objective_of(Tagged(), [{"pixel_values": X, "mask": mask, "labels": Y, "name": ["a"] * 24}]) as f:
        here, v = f.product(torch.ones(f.size)), torch.ones(f.size)
    plain = Objective(network(), F.cross_entropy, [(X * mask, Y)])
    torch.testing.assert_close(here, plain.product(v), rtol=1e-11, atol=1e-13)
    found = look(Tagged(), [{"pixel_values": X, "mask": mask, "labels": Y}], k=1, products=6, by_layer=True)
    assert [layer.name for layer in found.layers] == ["net.0", "net.2"]

    class Dictionary(Tagged):
        def forward(self, pixel_values, mask=None):
            return vars(super().forward(pixel_values, mask))

    with objective_of(Dictionary(), [{"pixel_values": X, "mask": mask, "labels": Y}]) as f:
        torch.testing.assert_close(f.product(v), plain.product(v), rtol=1e-11, atol=1e-13)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(dim=1))


def test_attention_against_a_dense_hessian():
    torch.manual_seed(0)
    model, x, y = Encoder().double(), torch.randn(6, 3, 4, dtype=torch.float64), torch.arange(6) % 3
    model.eval()
    names, shapes = zip(*[(n, p.shape) for n, p in model.named_parameters()], strict=True)
    w = torch.cat([p.detach().flatten() for p in model.parameters()])

    def f(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        named = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return F.cross_entropy(functional_call(model, named, (x,)), y)

    with twice_differentiable():
        # Column by column: torch.func.hessian, which uses vmap, is wrong for the weights of LayerNorm in torch 2.13.
        dense = torch.stack([jvp(grad(f), (w,), (unit,))[1] for unit in torch.eye(len(w), dtype=w.dtype)])
        h = 1e-5 * torch.ones_like(w)
        difference = (grad(f)(w + h) - grad(f)(w - h)) / 2e-5
    torch.testing.assert_close(dense.sum(dim=1), difference, rtol=1e-6, atol=1e-8)
    model.train()
    with objective_of(model, (x, y)) as objective:
        v = torch.linspace(-1, 1, objective.size, dtype=torch.float64)
        torch.testing.assert_close(objective.product(v), dense @ v, rtol=1e-9, atol=1e-12)
    found = look(model, (x, y), k=2, products=6, by_layer=True)
    top = torch.linalg.eigvalsh(dense).flip(0)[:2].tolist()
    assert found.spectrum.eigenvalues == pytest.approx(top, rel=1e-3)
    assert torch.backends.mha.get_fastpath_enabled()
    bare = Objective(model, F.cross_entropy, [(x, y)])
    torch.testing.assert_close(bare.product(v), dense @ v, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dense_hessian(bare, rows=16), dense, rtol=1e-9, atol=1e-12)
    convex = Objective(model, F.cross_entropy, [(x, y)], ["head.weight", "head.bias"])  # linear in these: H = G
    some = v[: convex.size]
    torch.testing.assert_close(convex.gauss_newton(some), convex.product(some), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["look", "spectrum", "landscape", "sharpness"])
def test_help_shows_model_data_and_every_option(name):
    function = getattr(flatness, name)
    first, *others = inspect.signature(function).parameters
    assert [first, *others[:5]] == ["model", "data", "loss", "samples", "batch", "collate"] and "seed" in others
    assert "data: a pair of tensors" in function.__doc__


def test_an_unknown_plane_is_answered_with_the_known_ones():
    with pytest.raises(FedflatError, match="did you mean eigen"):
        flatness.landscape(network(), (X, Y), directions="eigem")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stpes": 3}, "look: there is no option 'stpes'; did you mean steps"),
        ({"samples": "all"}, "samples = 'all'"),
        ({"loss": "mse"}, "loss: is a str; give a function"),
        ({"k": 0}, "k = 0: ask for at least one"),
    ],
)
def test_a_mistake_in_the_options_is_one_sentence(options, sentence):
    with pytest.raises(RecipeError, match=sentence):
        look(network(), (X, Y), **options)


def test_a_model_without_values_is_named():
    with pytest.raises(RecipeError, match=r"0\.weight is on the meta device"):
        look(network().to("meta"), (X, Y))


def test_sparse_embeddings_are_dense_during_the_measurement():
    tokens, found = torch.randint(0, 9, (len(Y), 2), generator=torch.Generator().manual_seed(0)), []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 3)).double()
        found.append(flatness.spectrum(model, (tokens, Y)))
        assert model[0].sparse is sparse
    assert found[0] == found[1]
