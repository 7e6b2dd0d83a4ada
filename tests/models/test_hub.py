"""Models of `transformers` and `peft`: from a configuration or a folder, trained and measured like any other."""

import copy
import json
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedflat import Dataset, Federation, Samples, federate, train
from fedflat.errors import RecipeError
from fedflat.flatness import Objective
from fedflat.models import Network, build, lora, merged, unit
from fedflat.runs.neighbours import features_and_logits
from fedflat.tasks import TASKS

pytest.importorskip("transformers")

TOKENS, LENGTH = 12, 6
GPT2 = dict(model_type="gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0)  # fmt: skip
BERT = dict(model_type="bert", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9,
            max_position_embeddings=LENGTH)  # fmt: skip


def made(config, per_token=False, classes=None, **options):
    classes = classes or (TOKENS if per_token else 3)
    return build("transformers", (LENGTH,), classes, vocabulary=TOKENS, per_token=per_token, config=config, **options)


@pytest.fixture(scope="module")
def peft():
    """Imported where it is used: it takes seconds, which every worker would spend while it collects the tests."""
    return pytest.importorskip("peft")


def texts(count=40, seed=0):
    """Rows of tokens with padding at their end, and next tokens as labels."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (count, LENGTH + 1), generator=chance)
    short = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (count, 1), generator=chance)
    return tokens[:, :-1].masked_fill(short, -1), tokens[:, 1:].masked_fill(short, -100)


def federation(per_token):
    tokens, following = texts()
    labels = following if per_token else tokens[:, 0] % 3
    samples = Samples(tokens, labels)
    kind = {"task": "next-token"} if per_token else {}
    dataset = Dataset("texts", samples, samples, TOKENS if per_token else 3, (), (), vocabulary=TOKENS, **kind)
    return Federation(dataset, [torch.arange(i, 40, 4) for i in range(4)])


def trained():
    """A GPT-2 whose weights are not those of a new one."""
    module, chance = made(GPT2, per_token=True), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=chance))
    return module


@pytest.fixture
def folder(tmp_path):
    trained().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("config", [GPT2, BERT], ids=["gpt2", "bert"])
def test_padding_does_not_change_the_logits_of_a_text(config):
    module = Network(made(config)).module.eval()
    for text in [1, 2, 0], [5, 0]:
        short, padded = torch.tensor([text]), torch.tensor([text + [-1] * (LENGTH - len(text))])
        torch.testing.assert_close(module(padded), module(short), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "per_token", "method"),
    [(GPT2, True, "fedsam"), (GPT2, False, "fedsmoo"), (BERT, False, "fedsol"), (BERT, False, "fedavg")],
)
def test_a_recipe_trains_it_and_the_base_of_adapters_never_changes(config, per_token, method):
    settings = dict(cohort=2, lr=0.05, engine="inline", model_config=config, model_lora={"rank": 2})
    one, result = (train(federation(per_token), "transformers", method, rounds=n, **settings) for n in (1, 2))
    stays = {n: torch.equal(p, one.model.get_parameter(n)) for n, p in result.model.named_parameters()}
    assert all(stays[name] for name, parameter in result.model.named_parameters() if not parameter.requires_grad)
    assert not any(stay for name, stay in stays.items() if name.endswith("lora_b"))
    assert hasattr(result.model(torch.zeros(1, 3, dtype=torch.long)), "logits")  # the user's module is theirs again


@pytest.mark.parametrize(
    ("config", "names"), [(GPT2, ["act"]), (BERT, ["intermediate_act_fn", "activation"])], ids=["gpt2", "bert"]
)
def test_man_sees_what_the_gelu_of_a_block_hands_to_its_last_layer(config, names):
    network, seen = Network(made(config)), []
    (last,) = [m for n, m in network.module.named_modules() if n.endswith(("mlp.c_proj", ".0.output.dense"))]
    last.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad(), network.listening(activations=True) as tap:
        squares = tap(texts(3)[0]).squares
    assert [name.rpartition(".")[2] for name in squares] == names
    expected = seen[0][texts(3)[0] >= 0].square().mean()  # padding has no activations
    assert float(next(iter(squares.values()))) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("config", "layer"), [(GPT2, "h.0.attn.c_proj"), (BERT, "layer.0.attention.output.dense")], ids=["gpt2", "bert"]
)
def test_man_sees_what_the_heads_of_an_attention_have_mixed_if_asked_to(config, layer):
    module, x = made(config), texts(3)[0]
    network, seen = Network(module), []
    (last,) = [each for name, each in module.named_modules() if name.endswith(layer)]
    last.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad(), network.listening(activations=True, attention=True) as tap:
        squares = tap(x).squares
    (found,) = [float(square) for name, square in squares.items() if name.endswith(layer)]
    assert found == pytest.approx(float(seen[0][x >= 0].square().mean())) and len(squares) > 1
    for attention in (False, True):  # and it is in the loss, whose gradient reaches the values that are mixed
        settings = dict(rounds=1, cohort=2, lr=0.5, engine="inline", model_config=config)
        result = train(federation(False), "transformers", f"fedavg + man(1.0, attention={attention})", **settings)
        assert any(name.endswith(layer) for name in result.history[0]["notes"]) == attention


def test_a_module_of_ones_own_and_one_wrapped_by_peft_are_trained(peft):
    tokens = federation(per_token=True)
    module = made(GPT2, per_token=True)
    wrapped = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    result = train(
        tokens, wrapped, "fedsam + fedflat.methods.parts:ProductAverage", rounds=1, cohort=2, engine="inline"
    )
    assert result.summary["parameters_trained"] == 2 * (8 + 24)
    assert any(float(p.detach().norm()) > 0 for n, p in result.model.named_parameters() if "lora_B" in n)
    plain = merged(Network(result.model).module)
    assert not any("lora" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(plain.eval()(texts()[0]), Network(result.model).module.eval()(texts()[0]))


def test_what_peft_merges_takes_the_inputs_that_it_took_before(peft):
    """A trained model normalises raw inputs itself; the merged one must do so too."""
    data = federate("digits", clients=4)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    wrapped = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["1", "3"]))
    model = train(data, wrapped, rounds=1, lr=0.01, engine="inline").model
    x = data.dataset.test.inputs[:20].float() / 255
    torch.testing.assert_close(merged(model)(x), model(x))


@pytest.mark.parametrize("config", [GPT2, BERT], ids=lambda config: config["model_type"])
def test_a_next_token_is_predicted_from_those_before_it(config):
    module = Network(made(config, per_token=True)).module.eval()
    texts = torch.randint(TOKENS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    other = texts.clone()
    other[0, -1] = (texts[0, -1] + 1) % TOKENS
    torch.testing.assert_close(module(texts)[0, :-1], module(other)[0, :-1])


def test_a_model_that_sees_the_tokens_it_would_predict_is_refused():
    config = dict(model_type="xlm", emb_dim=8, n_layers=1, n_heads=2)
    with pytest.raises(RecipeError, match="xlm sees the tokens that it would have to predict"):
        made(config, per_token=True)


@pytest.mark.parametrize("config", [GPT2, BERT], ids=lambda config: config["model_type"])
def test_tokens_can_have_other_classes(config):
    assert Network(made(config, per_token=True, classes=4)).module(texts()[0]).shape[1:] == (LENGTH, 4)


@pytest.mark.parametrize("kind", ["linear", "conv", "gpt2"])
def test_our_forward_is_that_of_peft_on_the_same_factors(peft, kind):
    torch.manual_seed(0)
    x, options = torch.randn(3, 6), {}
    if kind == "linear":
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    elif kind == "conv":
        module, x = (
            nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(36, 2)),
            torch.randn(3, 2, 6, 6),
        )
    else:
        module, x, options = made(GPT2, per_token=True), texts()[0], {"fan_in_fan_out": True}
    module = module.eval()
    target = "c_attn" if kind == "gpt2" else "0"
    ours = lora(module, 2, alpha=3.0, targets=target)
    theirs = peft.get_peft_model(
        copy.deepcopy(module), peft.LoraConfig(r=2, lora_alpha=3, target_modules=[target], **options)
    )
    factors = {n: torch.randn_like(p) for n, p in ours.named_parameters() if p.requires_grad}
    theirs_named = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    assert len(factors) == len(theirs_named) == 2
    with torch.no_grad():
        for (name, value), parameter in zip(factors.items(), theirs_named.values(), strict=True):
            ours.get_parameter(name).copy_(value)
            parameter.copy_(value)
    ours, theirs = (Network(m, torch.float64).module.eval() for m in (ours, theirs))
    x = x.double() if x.is_floating_point() else x
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_trained_model_is_measured_on_padded_texts_and_stays_the_librarys(per_token):
    result = train(federation(per_token), "transformers", rounds=1, engine="inline", model_options={"config": GPT2})
    found = result.flatness(samples=0, k=1, products=6)
    x, y = federation(per_token).dataset.train.inputs, federation(per_token).dataset.train.labels
    padding = result.model.config.pad_token_id
    outputs = result.model.eval()(input_ids=torch.where(x >= 0, x, padding), attention_mask=(x >= 0).long())
    expected = TASKS["next-token" if per_token else "classification"].loss(outputs.logits, y)
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_hessian_products_are_differences_of_gradients():
    module, batch = made(GPT2, per_token=True).double(), texts(8)
    objective = Objective(module, TASKS["next-token"].loss, [batch])
    v = unit(torch.randn(objective.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    w, step = objective.weights, 1e-5
    slopes = []
    for sign in (1, -1):
        with objective.at(w + sign * step * v):
            slopes.append(objective.gradient())
    torch.testing.assert_close(objective.product(v), (slopes[0] - slopes[1]) / (2 * step), rtol=1e-5, atol=1e-7)


def test_a_folder_is_read_and_nothing_is_downloaded(folder, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it goes to the network"))
    module = build("transformers", (LENGTH,), TOKENS, vocabulary=TOKENS, per_token=True, folder=str(folder))
    x = texts()[0]
    found, saved, new = (Network(each).module.eval()(x) for each in (module, trained(), made(GPT2, per_token=True)))
    assert torch.equal(found, saved) and not torch.allclose(found, new)
    with pytest.raises(RecipeError, match=r"^model.folder = 'gpt2': is not a local folder with a config.json; nothing"):
        build("transformers", (LENGTH,), TOKENS, vocabulary=TOKENS, per_token=True, folder="gpt2")


def test_code_in_a_folder_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(RecipeError, match=r"^model.folder = .*: its config.json cannot be read \("):
        build("transformers", (LENGTH,), TOKENS, vocabulary=TOKENS, per_token=True, folder=str(folder))


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def without(folder, part):
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if part not in k}, folder / "model.safetensors", {"format": "pt"})


def not_a_number(folder):
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cut_short(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: change(folder, n_embd=16), "its config.json asks for weights that it does not hold: "),
        (lambda folder: change(folder, n_layer=2), r"does not hold: transformer\.h\.1\."),
        (lambda folder: change(folder, model_type="bert"), "its config.json asks for weights that it does not hold: "),
        (lambda folder: without(folder, "mlp"), r"does not hold: transformer\.h\.0\.mlp\."),
        (not_a_number, "has a number that is not finite"),
        (cut_short, "the model cannot be built"),
        (lambda folder: change(folder, n_embd="x"), "its config.json cannot be read"),
        (
            lambda folder: change(folder, model_type="vit", vocab_size=None),
            "its config.json has no vocab_size; is it a",
        ),
    ],
    ids=["width", "layers", "kind", "missing", "nan", "cut", "type", "images"],
)
@pytest.mark.parametrize("per_token", [True, False])
def test_a_folder_without_the_weights_of_its_model_is_refused(folder, spoil, sentence, per_token):
    """Only the head of a classifier may be new: elsewhere the library would draw weights at random without a word."""
    read = dict(vocabulary=TOKENS, per_token=per_token, folder=str(folder))
    build("transformers", (LENGTH,), TOKENS if per_token else 3, **read)
    spoil(folder)
    with pytest.raises(RecipeError, match=rf"^model\.folder = .*: .*{sentence}"):
        build("transformers", (LENGTH,), TOKENS if per_token else 3, **read)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"config": {**GPT2, "n_embed": 8}}, "model.config.n_embed: gpt2 has no such field; did you mean n_embd"),
        ({"config": {**GPT2, "vocab_size": "x"}}, "^model.config: "),
        ({"config": {**GPT2, "n_head": 0}}, "^model.config: "),
        ({}, "give it either a config or a folder"),
        ({"config": {}}, r"model.config.model_type = '': is none of transformers' own"),
        ({"config": {**GPT2, "n_head": 3}}, "model.config"),
        ({"config": {**GPT2, "vocab_size": 3}}, "model.config.vocab_size = 3: the data has 12 tokens"),
        ({"config": {**GPT2, "n_positions": 4}}, r"reads up to 4 tokens, and a sample has the shape \(6,\)"),
    ],
)
def test_mistakes_get_one_sentence(options, sentence):
    with pytest.raises(RecipeError, match=sentence):
        build("transformers", (LENGTH,), 3, vocabulary=TOKENS, **options)


def test_weights_in_another_format_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(RecipeError, match=r"holds no \.safetensors, and other formats are not read"):
        build("transformers", (LENGTH,), 3, vocabulary=TOKENS, folder=str(folder))


def test_the_head_of_what_peft_has_wrapped_is_its_layer_with_the_adapters(peft):
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    network = Network(peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["0", "2"])))
    x = torch.randn(4, 6)
    network.choose_head(x)
    assert network.ends_in_head and network.head == slice(network.size - 2 * 5 - 3 * 2, network.size)
    features, logits = features_and_logits(network, x)
    assert torch.equal(network.head_module(features), logits) and features.shape == (4, 5)
