"""Text becomes samples: windows as in LEAF, owners, the end for testing; and what a damaged file is answered with."""

import json

import pytest
import tokenizers
import torch

from fedflat.errors import DataError, FedflatError, RecipeError
from fedflat.federation import Dataset, Samples, corpora, federate, load, subwords
from fedflat.federation.text import LETTERS, read_json_lines

PLAY = """First Citizen:
Before we proceed any further,   hear me speak.
You are all resolved.

All:
Speak, speak.

First Citizen:
You know Caius Marcius.

MUTE:

All:
We know't, we know't.
"""


@pytest.fixture
def play(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/input.txt").write_text(PLAY)
    return tmp_path


def read(row):
    return "".join(LETTERS[i] for i in row.tolist() if i >= 0)


def test_leafs_alphabet_has_80_characters():
    assert len(LETTERS) == len(set(LETTERS)) == 80


def test_every_character_of_a_speech_is_a_label_after_a_window_that_starts_with_blanks(play):
    data = load("shakespeare", play, window=10)
    speech = "Before we proceed any further, hear me speak. You are all resolved.\n"
    own = data.train.groups == 0
    assert read(data.train.labels[own]) == speech
    assert [read(row) for row in data.train.inputs[own][:2]] == [" " * 10, " " * 9 + "B"]
    assert read(data.test.labels[data.test.groups == 0]) == "You know Caius Marcius.\n"
    assert (data.classes, data.vocabulary, data.task) == (80, 80, "classification")


def test_windows_that_predict_every_next_character_do_not_overlap(play):
    data = load("shakespeare", play, window=10, predict="all")
    own = data.train.groups == 1
    inputs, labels = data.train.inputs[own], data.train.labels[own]
    assert [read(row) for row in inputs] == ["Speak, spe", "ak."]
    assert [read(row) for row in labels] == ["peak, spea", "k.\n"]
    assert inputs[1, 3:].unique().tolist() == [-1] and labels[1, 3:].unique().tolist() == [-100]
    assert data.task == "next-token"


def test_roles_are_natural_clients_with_their_own_test_samples(play):
    federation = federate(load("shakespeare", play, window=10), "natural", 0)
    assert federation.clients == 2
    groups = federation.dataset.test.groups
    assert [groups[held].unique().tolist() for held in federation.local_tests(0)] == [[0], [1]]


@pytest.mark.parametrize("name", ["shakespeare", "text"])
def test_the_halves_are_every_second_role_or_file_and_have_the_same_tokens(tmp_path, name):
    said = {who: f"I am {who}, and I have this to say to you all. " * 4 for who in "ABCDE"}
    (tmp_path / "shakespeare").mkdir()
    play = "\n\n".join(f"{who}:\n{text}" for who, text in said.items() for _ in range(2))
    (tmp_path / "shakespeare/input.txt").write_text(f"{play}\n\nTIM:\nToo short.")
    for who, text in said.items():
        (tmp_path / f"{who}.txt").write_text(text)
    cut = dict(directory=tmp_path, split="natural", window=20, predict="all", shortest=30)
    halves = [federate(name, half=half, **cut) for half in (0, 1, 2)]
    assert [each.clients for each in halves] == [5, 3, 2]
    spoken = [[each.dataset.train.inputs[shard] for shard in each.shards] for each in halves]
    assert all(map(torch.equal, spoken[0][0::2], spoken[1])) and all(map(torch.equal, spoken[0][1::2], spoken[2]))
    assert len({each.dataset.tokenizer for each in halves}) == 1


@pytest.mark.parametrize("data", ["digits", "jsonl", "ag-news", "datasets"])
@pytest.mark.parametrize("option", ["half", "shortest"])
def test_there_is_no_choice_among_owners_that_are_no_roles_or_files(data, option):
    told = rf"^data\.{option} = 1: only shakespeare and text have roles or files to choose from$"
    with pytest.raises(RecipeError, match=told):
        federate(data, **{option: 1})


def test_a_half_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("to be or not to be " * 20)
    with pytest.raises(DataError, match=r"x\.txt has one text of 0 characters, so data\.half = 2 is empty"):
        federate("text", directory=tmp_path / "x.txt", half=2)
    with pytest.raises(RecipeError, match=r"data\.half = 3: must be 1 or 2, or 0 for both halves"):
        federate("text", directory=tmp_path / "x.txt", half=3)


def test_only_texts_have_a_length():
    with pytest.raises(RecipeError, match=r"data\.by_length = true: is for texts, and the samples of digits are none"):
        federate("digits", by_length=True)


def test_batches_by_length_hold_every_text_once_with_little_padding():
    """An epoch of 200 texts of 1 to 20 tokens: the same samples as without, in batches of nearly equal lengths."""
    longest = torch.arange(200) % 20 + 1
    tokens = torch.where(torch.arange(20) < longest[:, None], torch.arange(200)[:, None], -1)
    samples = Samples(tokens, torch.zeros(200, dtype=torch.int64))
    data = Dataset("texts", samples, samples, 1, (), (), vocabulary=200)
    width = {}
    for by_length in (False, True):
        federation = federate(data, "iid", 1, by_length=by_length)
        order = torch.Generator().manual_seed(0)
        batches = [inputs for inputs, _ in federation.batches(0, 10, 20, order, None)]
        assert sorted(torch.cat([batch[:, 0] for batch in batches]).tolist()) == [*range(200)]
        width[by_length] = [batch.shape[1] for batch in batches]
    assert sum(width[True]) < 0.6 * sum(width[False])
    assert width[True] != sorted(width[True]), (
        "the batches are shuffled again, so that no epoch starts with short texts"
    )


@pytest.mark.parametrize(("labels", "columns"), [(torch.ones(4, 6), 6), (torch.ones(4, 6, dtype=torch.int64), 2)])
def test_padding_is_cut_from_the_labels_of_tokens_and_not_from_several_labels_of_a_text(labels, columns):
    """Texts of 2 tokens, padded to 6, with as many labels as columns: floating ones belong to the text."""
    tokens = torch.where(torch.arange(6) < 2, torch.zeros(4, 6, dtype=torch.int64), -1)
    samples = Samples(tokens, labels)
    federation = federate(Dataset("texts", samples, samples, 6, (), (), vocabulary=9), [[0, 1, 2, 3]])
    for inputs, given in (federation.batch(torch.arange(4), None), federation.held_out("test", 0, 4)):
        assert (inputs.shape, given.shape) == ((4, 2), (4, columns))


def lines(*rows):
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


def test_json_lines_with_labels_are_texts_to_classify(tmp_path):
    rows = [{"text": f"{'good' if i % 2 else 'bad'} day {i}", "label": i % 2, "client": f"c{i % 3}"} for i in range(30)]
    (tmp_path / "x.jsonl").write_text(lines(*rows))
    data = load("jsonl", tmp_path / "x.jsonl", window=4, words=50)
    assert (data.classes, len(data.train) + len(data.test), data.task) == (2, 30, "classification")
    assert data.train.groups.unique().numel() == 3


def test_ag_news_is_read_from_its_official_files(tmp_path, monkeypatch):
    """Class, title and description; quotes are doubled, and a description may have several lines."""
    monkeypatch.setattr(corpora, "AG_NEWS", (4, 1))
    (tmp_path / "ag-news").mkdir()
    rows = ['"3","Oil","Prices ""rise""\nagain"', '"1","World","Talks"', '"2","Cup","Final"', '"4","Chip","Fast"']
    (tmp_path / "ag-news/train.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "ag-news/test.csv").write_text('"4","Chip","Slow"\n')
    data = load("ag-news", tmp_path, window=6, words=20)
    assert (data.classes, data.task, data.train.inputs.shape) == (4, "classification", (4, 6))
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([2, 0, 1, 3], [3])
    assert [(row >= 0).sum().item() for row in data.train.inputs.int()] == [6, 2, 2, 2]  # a quote is a token
    (tmp_path / "ag-news/train.csv").write_text("\n".join(['"1","",""', *rows[1:]]) + "\n")
    with pytest.raises(DataError, match="text 1 has no word"):
        load("ag-news", tmp_path)


def test_a_folder_of_texts_has_an_owner_for_each_file(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"all that {name} has said and more " * 8)
    (tmp_path / "notes.md").write_text("no text of anybody")
    data = load("text", tmp_path, window=10, predict="all")
    federation = federate(data, "natural", 0)
    assert (data.task, federation.clients) == ("next-token", 2)
    assert torch.equal(data.train.inputs[0, 1:], data.train.labels[0, :-1].to(data.train.inputs.dtype))
    assert {int(x) for x in data.test.groups} == {0, 1}


def test_json_lines_end_at_line_feeds_alone(tmp_path):
    """Python splits lines at more characters, which JSON may hold as they are; and files may begin with a mark."""
    texts = ["one\u2028two", "three\u0085four", "five"]
    content = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "x.jsonl").write_bytes(("\ufeff" + content).encode())
    assert [row.text for row in read_json_lines(tmp_path / "x.jsonl")] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text", b"caf\xe9", "is not UTF-8 text: byte 3 is 0xe9"),
        ("text", b"  \n", "is empty"),
        ("jsonl", b'{"text": "a b"}\n{"text": ', r"line 2: is not valid JSON"),
        ("jsonl", b'{"label": 3}', r"line 1: has no text under 'text'"),
        ("jsonl", b'{"text": "a", "label": [1]}', r"line 1: label is neither a word nor a whole number"),
        ("jsonl", b'{"text": "a \\ud83d"}', "line 1: has half of a character"),
        ("jsonl", b'{"text": "a", "label": "\\udc00"}', "line 1: has half of a character"),
        ("jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}', "has a label for 1 of 2 texts"),
        ("shakespeare", b"no colon here\nwords", r"line 1: 'no colon here' is not the name of a role"),
        ("shakespeare", b"MUTE:\n\nOTHER:\n", "has no role that says anything"),
        ("ag-news", b'"3","title","text"\n', "holds 1 texts of AG News where 120000 were published"),
        ("ag-news", b'"5","title","text"\n', r"row 1: is not a class from 1 to 4"),
    ],
)
def test_a_damaged_file_is_answered_in_a_sentence(tmp_path, name, content, message):
    path = tmp_path / "file.txt"
    if name in ("shakespeare", "ag-news"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / ("input.txt" if name == "shakespeare" else "train.csv")
        (tmp_path / name / "test.csv").write_bytes(content)
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(name, path if name in ("text", "jsonl") else tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predict": "foo"}, "data.predict = 'foo': take next or all"),
        ({"words": -3}, "data.words = -3: must be 0 or more"),
        ({"shortest": 10**6}, "has no text of 1000000 characters; lower data.shortest"),
        ({"words": 3, "tokenizer": "t"}, "data.words = 3: data.tokenizer has tokens of its own; leave one of them out"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, options, message):
    (tmp_path / "x.txt").write_text("to be or not to be " * 20)
    with pytest.raises(FedflatError, match=message):
        load("text", tmp_path / "x.txt", **options)


def test_a_text_with_a_label_is_one_sample_and_has_no_windows(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text(lines(*[{"text": "good day", "label": i % 2} for i in range(10)]))
    monkeypatch.setattr(corpora, "AG_NEWS", (1, 1))
    (tmp_path / "ag-news").mkdir()
    for part in ("train", "test"):
        (tmp_path / f"ag-news/{part}.csv").write_text('"3","title","text"\n')
    for name, place in (("jsonl", tmp_path / "x.jsonl"), ("ag-news", tmp_path)):
        for option, told in (({"predict": "all"}, "predict = 'all'"), ({"stride": 2}, "stride = 2")):
            with pytest.raises(RecipeError, match=rf"^data\.{told}: the texts of .* have labels, .*; leave it out$"):
                load(name, place, **option)


def test_shakespeare_has_leafs_characters_unless_every_token_is_predicted(play, tmp_path):
    with pytest.raises(RecipeError, match=r"^data\.words = 9: shakespeare has LEAF's 80 characters; leave it out$"):
        load("shakespeare", play, words=9)
    save_tokenizer(tmp_path / "tokenizer.json", ["[UNK]", "speak"])
    with pytest.raises(RecipeError, match=r"^data\.tokenizer: shakespeare has LEAF's windows of characters; take data"):
        load("shakespeare", play, tokenizer=str(tmp_path))
    data = load("shakespeare", play, tokenizer=str(tmp_path), predict="all", window=4)
    own = data.train.groups == 1
    assert data.train.inputs[own].tolist() == [[0, 0, 1, -1]] and data.vocabulary == 2  # "Speak", ",", "speak", "."


def save_tokenizer(path, words):
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: k for k, w in enumerate(words)}, unk_token="[UNK]"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.save(str(path))


@pytest.mark.parametrize("by", ["folder", "file"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_tokenizer_json_gives_the_ids(tmp_path, by, kind):
    save_tokenizer(tmp_path / "tokenizer.json", ["[UNK]", "to", "be", "or"])
    text = "to be or not to be "
    (tmp_path / "x").write_text(
        text * 20 if kind == "text" else lines(*[{"text": text, "label": i % 2} for i in range(9)])
    )
    place = tmp_path / ("tokenizer.json" if by == "file" else "")
    data = load(kind, tmp_path / "x", window=8, tokenizer=str(place))
    first = [1, 2, 3, 0, 1, 2, 1, 2] if kind == "text" else [1, 2, 3, 0, 1, 2, -1, -1]
    assert data.train.inputs[0].tolist() == first and data.vocabulary == 4
    assert Dataset.of_facts(data.train, data.test, json.loads(json.dumps(data.facts()))).tokenizer == data.tokenizer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither a tokenizer.json nor a local folder with one; nothing is downloaded"),
        (b"", r"tokenizer.json is not a tokenizer \("),
        (b"[]", r"tokenizer.json is not a tokenizer \("),
        (b'{"model": 3}', r"tokenizer.json is not a tokenizer \("),
        (b"\xff", "tokenizer.json is not UTF-8 text"),
        (b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "u"}}', "has no token, where 1"),
        (b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4000000000}, "unk_token": "a"}}',
         "has an id of 4000000000, where 1 to 2,097,152 tokens are read"),
        (b" " * 2000, "holds more than the allowed 1,000 bytes"),
    ],
)  # fmt: skip
def test_a_damaged_tokenizer_is_answered_in_a_sentence(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(subwords, "LONGEST", 1000)
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        subwords.read_subwords(tmp_path)


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_answered_in_a_sentence(tmp_path):
    (tmp_path / "x.txt").write_text("to be or not to be " * 20)
    save_tokenizer(tmp_path / "tokenizer.json", ["to", "be"])
    with pytest.raises(DataError, match=r"^data\.tokenizer: cannot read a text \(.*\)$"):
        load("text", tmp_path / "x.txt", tokenizer=str(tmp_path))


@pytest.mark.parametrize(("stride", "starts"), [(0, [0, 4, 8]), (2, [0, 2, 4, 6, 8])])
def test_windows_of_every_next_token_overlap_if_the_stride_is_shorter(tmp_path, stride, starts):
    (tmp_path / "x.txt").write_text("abcdefghijkl")
    data = load("text", tmp_path / "x.txt", window=4, stride=stride, predict="all")
    assert data.train.inputs[:, 0].tolist() == starts


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        ([[0, 9]], [0], "token ids go from 0 to 9, where 0 to 4 are known"),
        ([[0, -2]], [0], "token ids go from -2 to 0"),
        ([[-1, 3]], [0], "padding before a token"),
        ([[0, 1]], [7], "labels must be classes from 0 to 4"),
        ([[0, 1]], [[1, 5]], "labels must be classes from 0 to 4"),
        ([[0, 1]], [[-100, -100]], "all labels of sample 0 are -100"),
    ],
)
def test_ids_and_labels_out_of_range_are_refused(inputs, labels, message):
    part = Samples(torch.tensor(inputs), torch.tensor(labels))
    with pytest.raises(DataError, match=message):
        Dataset("toy", part, part, 5, (), (), vocabulary=5)
