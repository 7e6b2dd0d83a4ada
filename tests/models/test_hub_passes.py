"""What a pass of a model of `transformers` shows: the features of a text, and activations without those of padding."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from fedflat import Dataset, Federation, Samples, train
from fedflat.errors import RecipeError
from fedflat.methods.chain import Method
from fedflat.methods.parts import ActivationNorm, ProximalAscent
from fedflat.models import Network, build
from fedflat.runs.loading import load_run
from fedflat.runs.neighbours import features_and_logits
from fedflat.runs.personal import personalise

pytest.importorskip("transformers")

TOKENS, LENGTH = 12, 6
DRY = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
GPT2 = dict(model_type="gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, **DRY)
OPT = dict(model_type="opt", hidden_size=8, word_embed_proj_dim=8, ffn_dim=9, num_hidden_layers=1,
           num_attention_heads=2, max_position_embeddings=LENGTH, dropout=0.0)  # fmt: skip


def made(config):
    torch.manual_seed(0)
    return build("transformers", (LENGTH,), 3, vocabulary=TOKENS, config=config)


def texts(count=40):
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=chance)
    short = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (count, 1), generator=chance)
    return tokens.masked_fill(short, -1)


def federation():
    tokens = texts()
    samples = Samples(tokens, tokens[:, 0] % 3)
    dataset = Dataset("texts", samples, samples, 3, (), (), vocabulary=TOKENS)
    return Federation(dataset, [torch.arange(i, 40, 4) for i in range(4)])


@pytest.mark.parametrize("padding", [TOKENS, 5], ids=["new token", "token of the texts"])
def test_the_features_of_a_text_are_what_the_head_makes_its_logits_of(padding):
    """GPT-2's classifier has logits for every token, and returns those of the last one that is no padding."""
    network = Network(made({**GPT2, "pad_token_id": padding}))
    inputs = texts()
    assert padding == TOKENS or bool((inputs.flip(1)[inputs.flip(1) >= 0] == padding).any())
    network.choose_head(inputs)
    features, logits = features_and_logits(network, inputs)
    assert features.shape == (40, 8) and not network.ends_in_head
    torch.testing.assert_close(network.head_module(features), logits)
    assert not pickle.loads(pickle.dumps(network)).ends_in_head


def test_neighbours_and_features_of_a_classifier_of_texts_of_several_lengths(tmp_path):
    config, settings = {"model_config": GPT2}, dict(rounds=1, cohort=2, lr=0.05, engine="inline")
    result = train(federation(), "transformers", "moon(1.0)", out=tmp_path, **settings, **config)
    assert not result.history[0].get("refused")
    problem = load_run(Path(tmp_path))
    mixed = personalise(problem, problem.network.weights, (0, 1), "knn", size=12)
    assert {each.epochs for each in mixed} == {0, 1} and all(each.accuracy_after is not None for each in mixed)


@pytest.mark.parametrize("rho", [0.0, 0.1], ids=["watched", "taken"])
@pytest.mark.parametrize("attention", [False, True])
def test_what_fedsol_perturbs_along_sees_the_attention_too(attention, rho):
    method = Method(ProximalAscent(ActivationNorm(attention=attention), rho=rho))
    settings = dict(rounds=1, cohort=2, lr=0.05, engine="inline", model_config=GPT2, measures=["cosine"])
    notes = train(federation(), "transformers", method, **settings).history[0]["notes"]
    assert any(name.endswith("attn.c_proj") for name in notes) == attention


def test_padding_is_no_activation_of_a_model_that_joins_the_texts_of_a_batch():
    network, seen = Network(made(OPT)), []
    (last,) = [each for name, each in network.module.named_modules() if name.endswith("fc2")]
    last.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    inputs = texts()
    with torch.no_grad(), network.listening(activations=True) as tap:
        (found,) = tap(inputs).squares.values()
    expected = seen[0].reshape(*inputs.shape, -1)[inputs >= 0].square().mean()
    assert float(found) == pytest.approx(float(expected))


def test_an_attention_that_only_has_a_name_of_those_of_transformers_is_not_looked_at():
    layers = nn.ModuleDict({"output": nn.ModuleDict({"dense": nn.Linear(4, 4)})})
    network = Network(nn.ModuleDict({"attention": layers, "act": nn.ReLU()}))
    with pytest.raises(RecipeError, match="no attention to look at"), network.listening(attention=True):
        pass
