"""Exported models: what others get is the model, in every form, and a card that tells the truth about it."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import datasets as hub
import numpy as np
import onnx
import onnxruntime
import pytest
import tokenizers
import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn

import fedflat
import forking
from fedflat.errors import RecipeError, RunError
from fedflat.federation.augment import normalise
from fedflat.models import MODELS, Normalised, build
from fedflat.models.source_code import source
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.export import Signature, export, onnx_bytes
from fedflat.runs.loading import load_run
from forking import without_fedflat

QUICK = ["server.rounds=3", "engine=inline", "local.epochs=1", "checkpoint.every=1"]


def finished(run, *changes):
    problem = prepare(load(None, [*QUICK, *changes]))
    execute(problem, run)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("runs") / "one", "method=fedsam(0.05) + man")


@pytest.fixture(scope="module")
def exported(run):
    return {path.name: path for path in export(run)}


def in_a_new_process(code, folder):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)


def executed(card, by=without_fedflat):
    """What each piece of the card's Python takes and gives, in a process of its own in which there is no fedflat."""
    pieces = re.findall(r"```python\n(.*?)```", card.read_text("utf-8"), re.S)
    name = next(name for name in ("images", "tokens", "inputs") if f"{name} = " in pieces[0])
    whole = "import sys\nsys.modules['fedflat'] = None\n"
    for number, piece in enumerate(pieces):
        keep = f'np.savez("kept{number}.npz", inputs=np.asarray({name}), logits=np.asarray(logits))'
        whole += f"{piece}\nimport numpy as np\n{keep}\n"
    done = by(whole, card.parent)
    assert done.returncode == 0, done.stderr
    kept = [np.load(card.parent / f"kept{number}.npz") for number in range(len(pieces))]
    return [(torch.from_numpy(file["inputs"]), torch.from_numpy(file["logits"])) for file in kept]


def answer(run, inputs):
    """The logits of the run's model for inputs that are not normalised yet."""
    problem = load_run(run)
    data = problem.federation.dataset
    with torch.no_grad():
        return problem.network.module(normalise(inputs, data.mean, data.std, inputs.dtype))


TEXT = ("char-lstm", "gpt")


def signature(name, shape=(3, 32, 32)):
    channels = (0.5, 0.4, 0.3)[: shape[0]]
    return Signature(name, {}, shape, 10, channels, (0.2, 0.3, 0.4)[: shape[0]], True, torch.float32)


def test_the_tensors_are_the_runs_under_their_plain_names(run, exported):
    ours, theirs = load_file(exported["model.safetensors"]), load_file(run / "model.safetensors")
    assert ours.keys() == theirs.keys() == dict(load_run(run).network.module.state_dict()).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with safe_open(exported["model.safetensors"], "pt") as file:
        facts = json.loads(file.metadata()["fedflat"])
    assert (facts["model"], facts["classes"], facts["shape"]) == ("mlp", 10, [1, 8, 8])
    assert (facts["mean"], facts["std"]) == ([0.305], [0.376])
    assert facts["network_takes"] == "(input - mean) / std"
    with_it = onnx.load(exported["model.onnx"]).metadata_props
    assert json.loads(next(p.value for p in with_it if p.key == "fedflat"))["network_takes"] == "input"


def test_a_network_of_others_gets_its_normalisation_and_one_without_stays_alone(tmp_path, digits):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fedflat.train(digits, net, rounds=1, engine="inline", out=tmp_path / "run")
    files = {path.name: path for path in export(tmp_path / "run", onnx=False)}
    code = files["network.py"].read_text("utf-8")
    assert "class Normalised" in code and "def mlp" not in code
    raw = fedflat.federate("digits", [shard.tolist() for shard in digits.shards], normalise=False)
    fedflat.train(raw, net, rounds=1, engine="inline", out=tmp_path / "raw")
    files = {path.name: path for path in export(tmp_path / "raw", onnx=False)}
    assert "network.py" not in files and "Normalised" not in files["README.md"].read_text("utf-8")


def test_the_cards_python_runs_without_fedflat_and_gives_the_models_answers(run, exported):
    pytorch, runtime = executed(exported["README.md"], in_a_new_process)
    for inputs, logits in (pytorch, runtime):
        assert inputs.shape == (4, 1, 8, 8)
        torch.testing.assert_close(logits, answer(run, inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TEXT])
def test_every_network_is_the_same_in_onnx_for_any_batch(name):
    network = build(name, (3, 32, 32), 10).eval()
    # Its feature maps of one pixel are divided by their deviation over a few samples, which magnifies rounding.
    steep = name == "resnet18-pfllib"
    content = onnx_bytes(network, signature(name))
    session = onnxruntime.InferenceSession(content)
    assert (session.get_inputs()[0].name, session.get_inputs()[0].shape[1:]) == ("images", [3, 32, 32])
    for size in (8, 9) if steep else (1, 3):
        images = torch.rand(size, 3, 32, 32, generator=torch.Generator().manual_seed(size))
        (logits,) = session.run(None, {"images": images.numpy()})
        with torch.no_grad():
            expected = network(normalise(images, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-4 if steep else 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_networks_code_stands_alone_and_builds_the_same_network(name):
    space = {}
    exec(compile(source(name), "network.py", "exec"), space)
    chance = torch.Generator().manual_seed(0)
    if name in TEXT:
        options, inputs = dict(shape=(12,), classes=7, vocabulary=20), torch.randint(20, (2, 12), generator=chance)
    else:
        options, inputs = dict(shape=(1, 28, 28), classes=7), torch.rand(2, 1, 28, 28, generator=chance)
    network, twin = build(name, **options), space[MODELS[name].__name__](**options)
    twin.load_state_dict(network.state_dict())
    with torch.no_grad():
        assert torch.equal(twin.eval()(inputs), network.eval()(inputs))


SMALL = {
    "char-lstm": ["model.name=char-lstm", "model.embedding=4", "model.hidden=8", "data.predict=next"],
    "gpt": ["model.name=gpt", "model.width=8", "model.heads=2", "model.layers=1", "data.predict=next"],
    "lora": ["model.name=gpt", "model.width=8", "model.heads=2", "model.layers=1", "data.predict=all",
             "model.lora={rank = 2, targets = 'attention'}"],
}  # fmt: skip


WINDOW = 5  # an LSTM is unrolled over it, and ONNX takes its time for every step


@pytest.mark.parametrize("network", SMALL)
def test_a_run_on_text_is_read_again_and_exported_with_its_card(network, tmp_path):
    """Labels are those of whole windows or of every token; recipes do not say which, because the data do."""
    texts = [{"text": f"the quick brown fox number {n} jumps over the lazy dog", "client": n % 4} for n in range(24)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    data = ["data.name=jsonl", f"data.dir={tmp_path / 'texts.jsonl'}", f"data.window={WINDOW}", f"data.stride={WINDOW}"]
    recipe = load(None, [*QUICK, "split.name=natural", "split.clients=0", *data, *SMALL[network]])
    trained = execute(prepare(recipe), tmp_path / "run")
    again = load_run(tmp_path / "run")
    tokens = again.federation.dataset.test.inputs[:3].long()
    with torch.no_grad():
        assert torch.equal(again.network.module.eval()(tokens), trained.model.eval()(tokens))
    files = {path.name: path for path in export(tmp_path / "run")}
    vocabulary, every = again.federation.dataset.vocabulary, again.task.output == "tokens"
    for given, logits in executed(files["README.md"]):
        assert given.dtype == torch.int64 and given.shape == (4, WINDOW) and int(given.max()) < vocabulary
        assert logits.shape == ((4, WINDOW, vocabulary) if every else (4, vocabulary))
        torch.testing.assert_close(logits, again.network.module(given).detach(), rtol=0, atol=1e-5)


LABELLED = ["data.window=8", "data.words=20"]
BERT = "{model_type = 'bert', hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 9}"
READERS = {
    "char-lstm": ["data.window=12", "data.stride=12", *SMALL["char-lstm"]],
    "lora": ["data.window=12", "data.stride=12", *SMALL["lora"]],
    "labelled": [*LABELLED, *SMALL["gpt"][:-1]],
    "gpt2": ["data.window=12", "data.stride=12", "data.predict=all", "model.name=transformers"],
    "bert": [*LABELLED, "model.name=transformers", f"model.config={BERT}"],
}


@pytest.mark.parametrize(
    ("network", "kind"),
    [
        ("char-lstm", "next"),
        ("lora", "every"),
        ("labelled", "label"),
        ("in memory", "label"),
        ("gpt2", "every"),
        ("bert", "label"),
    ],
)
def test_an_export_reads_text_and_names_what_it_predicts(network, kind, tmp_path):
    """The texts of the test samples, through the card's code alone, give their token ids and the model's answers."""
    rows = [{"text": f"{'Good' if n % 3 else 'A bad'} day, {n % 7} times; no more than that?"} for n in range(30)]
    if kind == "label":
        rows = [{**row, "label": "fine" if n % 3 else "poor"} for n, row in enumerate(rows)]
    if network == "in memory":  # kept beside the run, with its tokenizer
        clients = fedflat.federate(hub.Dataset.from_list(rows), "iid", 3, words=20, window=8)
        small = dict(model_width=8, model_heads=2, model_layers=1, rounds=1, steps=2, engine="inline")
        fedflat.train(clients, "gpt", out=tmp_path / "run", **small)
    else:
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = READERS[network]
        if network == "gpt2":
            settings = transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2, n_positions=12)
            transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path / "base")
            options = [*options, f"model.folder={tmp_path / 'base'}"]
        data = ["data.name=jsonl", f"data.dir={tmp_path / 'texts.jsonl'}", "split.name=iid", "split.clients=3"]
        execute(prepare(load(None, [*QUICK, *data, *options])), tmp_path / "run")
    problem = load_run(tmp_path / "run")
    samples, tokenizer = problem.federation.dataset.test, problem.federation.dataset.tokenizer
    glue = " " if kind == "label" else ""
    rows = [[tokenizer.tokens[k] for k in row if k >= 0] for row in samples.inputs.tolist()]
    # Of a longer text, the beginning has a label, and the end has a next token.
    more = ([], ["and", "more"]) if kind == "label" else (["and", "more"], [])
    texts = [glue.join([*more[0], *row, *more[1]] if len(row) == samples.inputs.shape[1] else row) for row in rows]
    assert sum("more" in text for text in texts) > 2
    files = {path.name: path for path in export(tmp_path / "run", onnx=False, out=tmp_path / "shared")}
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files.values())
    card = files["README.md"].read_text("utf-8")
    (piece,) = re.findall(r"```python\n(.*?)```", card, re.S)
    piece, changed = re.subn(r"^texts = .*$", "texts = json.load(open('texts.json'))", piece, flags=re.M)
    assert changed == 1 and "which no privacy mechanism protects" in card
    front = yaml.safe_load(card.split("---")[1])
    assert front["pipeline_tag"] == ("text-classification" if kind == "label" else "text-generation")
    (tmp_path / "shared" / "texts.json").write_text(json.dumps(texts))
    out = "json.dump([tokens.tolist(), predicted], open('told.json', 'w'))"
    done = without_fedflat(f"{piece}\n{out}", tmp_path / "shared")
    assert done.returncode == 0, done.stderr
    tokens, predicted = json.loads((tmp_path / "shared" / "told.json").read_text())
    assert tokens == samples.inputs.tolist()
    with torch.no_grad():
        logits = problem.network.module.eval()(samples.inputs.long())[..., : problem.federation.dataset.classes]
    ends = (samples.inputs >= 0).sum(dim=1) - 1
    best = (logits[torch.arange(len(ends)), ends] if kind == "every" else logits).argmax(dim=1).tolist()
    assert predicted == [("fine", "poor")[k] if kind == "label" else tokenizer.tokens[k] for k in best]
    assert json.loads(files["vocabulary.json"].read_text("utf-8"))["tokens"] == tokenizer.tokens


def tokenizer_of_a_folder(folder):
    """Pairs of letters as in GPT-2, a token before every text, and a truncation that is not ours."""
    pieces = ["[UNK]", "[CLS]", *"abcdefghijklmnopqrstuvwxyzAG", "da", "day", "th", "at", "that"]
    merges = [("d", "a"), ("da", "y"), ("t", "h"), ("a", "t"), ("th", "at")]
    rules = tokenizers.Tokenizer(BPE({piece: k for k, piece in enumerate(pieces)}, merges, unk_token="[UNK]"))
    rules.pre_tokenizer = Whitespace()
    rules.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    plain = tokenizers.Tokenizer.from_str(rules.to_str())
    rules.enable_truncation(3)
    rules.save(str(folder / "tokenizer.json"))
    return plain


@pytest.mark.parametrize("kind", ["every", "label"])
def test_texts_in_the_tokens_of_a_folder_are_trained_on_exported_and_read_by_the_card(kind, tmp_path):
    window, base = 12, tmp_path / "base"
    settings = transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2, n_positions=window)
    transformers.GPT2LMHeadModel(settings).save_pretrained(base)
    theirs = tokenizer_of_a_folder(base)
    texts = [f"{'Good' if n % 3 else 'A bad'} day, {'abc'[n % 3]} that is more than {n}" for n in range(30)]
    rows = [{"text": text, **({"label": "fgp"[n % 3]} if kind == "label" else {})} for n, text in enumerate(texts)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data.name=jsonl", f"data.dir={tmp_path / 'texts.jsonl'}", "split.name=iid", "split.clients=3",
            f"data.window={window}", f"data.tokenizer={base}", "model.name=transformers", f"model.folder={base}",
            *(["data.predict=all"] if kind == "every" else [])]  # fmt: skip
    trained = execute(prepare(load(None, [*QUICK, *data])), tmp_path / "run")
    assert 0 < trained.history[-1]["loss"] < 10

    problem = load_run(tmp_path / "run")
    dataset = problem.federation.dataset
    ids = [theirs.encode(text).ids for text in texts[4::5]]  # of these the test samples are
    assert all(row[0] == 1 and theirs.token_to_id("day") in row for row in ids)
    cut = [row[:window] for row in ids]
    if kind == "every":
        cut = [row[:-1][start : start + window] for row in ids for start in range(0, len(row) - 1, window)]
    assert [[k for k in row if k >= 0] for row in dataset.test.inputs.tolist()] == cut
    assert dataset.vocabulary == theirs.get_vocab_size()

    files = {path.name: path for path in export(tmp_path / "run", onnx=False, out=tmp_path / "shared")}
    assert files["tokenizer.json"].read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files.values())
    card = files["README.md"].read_text("utf-8")
    assert "which no privacy mechanism protects" not in card  # the tokens were there before the texts
    (piece,) = re.findall(r"```python\n(.*?)```", card, re.S)
    piece = re.sub(r"^texts = .*$", "texts = json.load(open('texts.json'))", piece, flags=re.M)
    (tmp_path / "shared" / "texts.json").write_text(json.dumps(texts))
    out = "json.dump([tokens.tolist(), logits.tolist(), predicted], open('told.json', 'w'))"
    done = without_fedflat(f"{piece}\n{out}", tmp_path / "shared")
    assert done.returncode == 0, done.stderr
    tokens, logits, predicted = json.loads((tmp_path / "shared" / "told.json").read_text())
    ends = [theirs.encode(text).ids for text in texts]
    ends = [row[-window:] if kind == "every" else row[:window] for row in ends]
    assert [[k for k in row if k >= 0] for row in tokens] == ends
    with torch.no_grad():
        expected = problem.network.module.eval()(torch.tensor(tokens))[..., : dataset.classes]
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=1e-5)
    last = [expected[k, len(row) - 1] if kind == "every" else expected[k] for k, row in enumerate(ends)]
    names = [theirs.id_to_token(k) for k in range(dataset.vocabulary)] if kind == "every" else "fgp"
    assert predicted == [names[int(row.argmax())] for row in last]


def test_texts_in_other_tokens_than_those_of_the_folder_are_refused(tmp_path):
    base, other = tmp_path / "base", tmp_path / "other.json"
    settings = transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2, n_positions=12)
    transformers.GPT2LMHeadModel(settings).save_pretrained(base)
    tokenizer_of_a_folder(base)
    table = json.loads((base / "tokenizer.json").read_text())
    table["model"]["vocab"] |= {"x": table["model"]["vocab"]["y"], "y": table["model"]["vocab"]["x"]}
    other.write_text(json.dumps(table))
    (tmp_path / "texts.jsonl").write_text('{"text": "Good day to you"}\n' * 30)
    data = ["data.name=jsonl", f"data.dir={tmp_path / 'texts.jsonl'}", "split.name=iid", "split.clients=3",
            "data.window=5", "data.predict=all", "model.name=transformers", f"model.folder={base}"]  # fmt: skip
    for own, unit in (("data.words=0", "character"), ("data.words=9", "word")):
        told = rf"^data\.tokenizer: the {unit}s of jsonl have ids of their own, .*; set data\.tokenizer = '{base}'$"
        with pytest.raises(RecipeError, match=told):
            prepare(load(None, [*QUICK, *data, own]))
    with pytest.raises(RecipeError, match=r"^data\.tokenizer: its ids stand for other tokens than in model\.folder"):
        prepare(load(None, [*QUICK, *data, f"data.tokenizer={other}"]))
    table = json.loads((base / "tokenizer.json").read_text())
    del table["model"]["vocab"]["q"]
    other.write_text(json.dumps(table))
    assert prepare(load(None, [*QUICK, *data, f"data.tokenizer={other}"]))  # a token fewer, and the others as they are
    settings = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=12)
    transformers.GPT2LMHeadModel(settings).save_pretrained(base)
    with pytest.raises(RecipeError, match=r"knows 20 tokens, and the data has 35; take the folder.s tokenizer.json"):
        prepare(load(None, [*QUICK, *data, f"data.tokenizer={base}"]))


@pytest.mark.parametrize("option", ["per_token=true", "classes=3", "vocabulary=9", "shape=[3]"])
def test_what_follows_from_the_data_cannot_be_set(option):
    with pytest.raises(RecipeError, match=f"model mlp: {option.partition('=')[0]} follows from the data"):
        prepare(load(None, [*QUICK, f"model.{option}"]))


def test_the_card_says_data_method_paper_rounds_and_which_accuracy(run, exported):
    card = exported["README.md"].read_text("utf-8")
    summary = json.loads((run / "summary.json").read_text())
    front = yaml.safe_load(card.split("---")[1])
    (metric,) = front["model-index"][0]["results"][0]["metrics"]
    assert (metric["value"], metric["name"]) == (
        summary["accuracy_last"],
        "accuracy on the test samples after round 3",
    )
    assert front["pipeline_tag"] == "image-classification"
    assert {"fedsam", "man"} <= {*front["tags"]}
    for text in (
        "3 rounds with 20 clients",
        "`dirichlet` (alpha = 0.1, refill = False)",
        "`fedsam(rho=0.05) + man(zeta=0.15, layers='all', attention=False)`",
        "Generalized Federated Learning via Sharpness Aware Minimization, ICML",
        f"| **this model**, after round 3 | **{summary['accuracy_last']:.4f}** |",
        "It is not differentially private",
    ):
        assert text in card
    assert load(exported["recipe.toml"]) == load(run / "recipe.toml")
    assert exported["recipe.toml"].read_text() in card


def test_the_cards_digests_are_those_of_the_files_and_an_export_can_be_repeated(run, exported, tmp_path):
    card = exported["README.md"].read_text("utf-8")
    for name, path in exported.items():
        assert name == "README.md" or f"| {name} | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |" in card
    assert all(path.read_bytes() == exported[path.name].read_bytes() for path in export(run, tmp_path / "again"))


def test_no_file_tells_where_it_was_made(tmp_path):
    from fedflat.federation import partition

    shards = [shard.numpy() for shard in fedflat.federate("digits", "iid", 3).shards]
    partition.save(tmp_path / "own.npz", shards)
    run = finished(tmp_path / "run", f"split={tmp_path / 'own.npz'}", f"data.dir={tmp_path}")
    places = (str(tmp_path).encode(), str(Path(fedflat.__file__).parent).encode(), str(Path(torch.__file__)).encode())
    for path in export(run):
        assert not [place for place in places if place in path.read_bytes()], path.name


def test_a_checkpoint_is_exported_with_its_own_round_and_accuracy(run):
    manifest = run / "checkpoints/00000002.json"
    files = {path.name: path for path in export(manifest, onnx=False)}
    assert files["README.md"].parent == run / "00000002-export"
    assert "model.onnx" not in files
    accuracy = json.loads(manifest.read_text())["accuracy"]
    assert f"| **this model**, after round 2 | **{accuracy:.4f}** |" in files["README.md"].read_text("utf-8")
    weights = load_file(run / "checkpoints/00000002.server.safetensors")["weights"]
    tensors, module = load_file(files["model.safetensors"]), load_run(manifest).network.module
    assert torch.equal(torch.cat([tensors[name].flatten() for name, _ in module.named_parameters()]), weights)


def test_numbers_that_are_no_pixels_and_double_precision_are_exported_as_they_are(tmp_path):
    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(60, 5)), chance.integers(0, 3, 60)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y, mean=[2.0], std=[3.0])
    changes = ["data=arrays", f"data.dir={tmp_path / 'mine.npz'}", "split=iid", "split.clients=3", "precision=float64"]
    run = finished(tmp_path / "run", *changes)
    card = next(path for path in export(run) if path.name == "README.md")
    assert "`inputs` of shape (N, 5), numbers as in the data set" in card.read_text("utf-8")
    for inputs, logits in executed(card):
        assert logits.dtype == torch.float64
        torch.testing.assert_close(logits, answer(run, inputs), rtol=0, atol=1e-6)


def test_a_split_made_in_python_is_exported(tmp_path, digits):
    listed = fedflat.federate("digits", [shard.tolist() for shard in digits.shards])
    result = fedflat.train(listed, rounds=1, engine="inline", out=tmp_path / "run")
    files = {path.name: path for path in export(tmp_path / "run", onnx=False)}
    assert "The split among 8 clients is made in Python" in files["README.md"].read_text("utf-8")
    tensors = load_file(files["model.safetensors"])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in result.model.state_dict().items())


class OneSize(nn.Module):
    """A network of which the exporter makes one for a single batch size."""

    def forward(self, x):
        return x.flatten(1) * len(x)


class Undecided(nn.Module):
    """A network whose way depends on the numbers that pass: it has no graph."""

    def forward(self, x):
        return x.flatten(1) if x.sum() > 0 else -x.flatten(1)


@pytest.mark.parametrize(
    ("network", "sentence"),
    [(OneSize(), "as ONNX it would allow only one batch size"), (Undecided(), "cannot be converted to ONNX")],
)
def test_a_network_that_onnx_cannot_hold_is_one_sentence(network, sentence, capfd):
    with pytest.raises(RunError, match=rf"^model mine: .*{sentence}.*; leave it out with --no-onnx$") as raised:
        onnx_bytes(network, signature("mine", (1, 8, 8)))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_the_normalisation_in_the_file_is_the_one_in_training():
    images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inside = signature("mine", (3, 4, 4)).normalised(nn.Identity())(images / 255)
    assert isinstance(signature("mine").normalised(nn.Identity()), Normalised)
    torch.testing.assert_close(inside, normalise(images, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))


def test_nothing_is_written_over_and_an_unfinished_run_is_named(run, exported, tmp_path):
    with pytest.raises(RunError, match=r"export: already exists; choose another directory with -o$"):
        export(run)
    (tmp_path / "recipe.toml").write_text((run / "recipe.toml").read_text())
    with pytest.raises(RunError, match="the run is not finished"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr("fedflat.runs.export.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'fedflat\[onnx\]'; or leave it out: --no-onnx"):
        export(run, tmp_path / "out")


def test_the_command_lists_what_it_wrote_and_says_nothing_else(run, tmp_path):
    done = forking.fedflat("export", str(run), "-o", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    named = [line.split()[0] for line in done.stdout.splitlines()]
    assert {*named} == {f"out/{path.name}" for path in (tmp_path / "out").iterdir()}
    assert "out/model.onnx" in named


def test_the_card_names_a_part_of_the_users_own(tmp_path):
    run = finished(tmp_path / "own", "method=fedflat.methods.parts:Ascent(rho=0.05) + man")
    card = {path.name: path for path in export(run)}["README.md"].read_text("utf-8")
    assert "- **fedflat.methods.parts:Ascent**: a custom part." in card


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_adapters_of_a_tied_head_are_merged_into_the_head_alone(tmp_path, kind):
    """The configurations tie the head to the embedding, which has no adapter."""
    (tmp_path / "texts.jsonl").write_text('{"text": "Good day to you, and good night"}\n' * 30)
    config = {
        "gpt2": '{model_type = "gpt2", n_embd = 8, n_layer = 1, n_head = 2, n_positions = 12}',
        "bert": f"{BERT[:-1]}, max_position_embeddings = 12}}",
    }[kind]
    data = ["data.name=jsonl", f"data.dir={tmp_path / 'texts.jsonl'}", "split.name=iid", "split.clients=3",
            "data.window=12", "data.predict=all"]  # fmt: skip
    model = ["model.name=transformers", f"model.config={config}", "model.lora={rank = 2, targets = 'all'}"]
    run = finished(tmp_path / "run", "local.lr=1.0", *data, *model)
    files = {path.name: path for path in export(run, onnx=False, out=tmp_path / "shared")}
    module = load_run(run).network.module
    assert float(module.get_output_embeddings().lora_b.detach().norm()) > 0.001
    ((tokens, logits),) = executed(files["README.md"])
    with torch.no_grad():
        torch.testing.assert_close(logits, module.eval()(tokens), rtol=0, atol=1e-5)


def test_a_model_of_transformers_that_classifies_tokens_is_built_as_one(tmp_path):
    tokens = torch.randint(9, (40, 6), generator=torch.Generator().manual_seed(0))
    samples = fedflat.Samples(tokens, tokens % 4)
    data = fedflat.Dataset("tags", samples, samples, 4, (), (), vocabulary=9, task="next-token")
    config = dict(model_type="bert", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9,
                  max_position_embeddings=6)  # fmt: skip
    settings = dict(rounds=1, engine="inline", model_config=config, out=tmp_path / "run")
    fedflat.train(fedflat.federate(data, "iid", 2), "transformers", **settings)
    files = {path.name: path for path in export(tmp_path / "run", onnx=False, out=tmp_path / "shared")}
    ((tokens, logits),) = executed(files["README.md"])
    with torch.no_grad():
        expected = load_run(tmp_path / "run").network.module.eval()(tokens)
    assert logits.shape == (4, 6, 4)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
