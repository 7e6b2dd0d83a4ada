"""The tokens of a tokenizer.json: what a hostile or odd file, or the path of one, is answered with."""

import json

import pytest
import tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.processors import TemplateProcessing

from fedflat.errors import DataError
from fedflat.federation import federate, load, subwords

WORDS = {"[UNK]": 0, "to": 1, "be": 2, "or": 3}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "x.txt").write_text("to be or not to be " * 20)
    return tmp_path / "x.txt"


def words():
    rules = tokenizers.Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return rules


@pytest.mark.parametrize("place", ["~nobody-has-this-name/t", "t" * 300, "t\0"], ids=["home", "long", "null"])
def test_the_path_of_a_tokenizer_that_cannot_be_is_answered_in_a_sentence(text, place):
    with pytest.raises(DataError, match=r"^data\.tokenizer = '.*': is neither a tokenizer\.json nor a local folder"):
        federate("text", directory=text, tokenizer=place)


def test_data_in_the_home_of_nobody_are_missing_like_others():
    with pytest.raises(DataError, match=r"~nobody-has-this-name/x\.txt is missing$"):
        federate("text", directory="~nobody-has-this-name/x.txt")


@pytest.mark.parametrize("number", [4, 255, 300, 2**32 - 1])
def test_a_special_token_beyond_the_vocabulary_is_not_taken_for_another_one(tmp_path, text, number):
    """In one byte, in which the ids of a small vocabulary are stored, 255 would be padding and 300 the id 44."""
    rules = words()
    rules.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", number)])
    rules.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=rf"^data\.tokenizer: gives a text the id {number}, and its last token is 3$"):
        load("text", text, tokenizer=str(tmp_path))


def test_a_tokenizer_that_draws_the_pieces_of_a_word_is_refused(tmp_path):
    rules = tokenizers.Tokenizer(BPE({"t": 0, "o": 1, "to": 2}, [("t", "o")], dropout=0.5))
    rules.save(str(tmp_path / "tokenizer.json"))
    told = r"tokenizer\.json gives a text other tokens each time \(model\.dropout = 0\.5\); set that to null$"
    with pytest.raises(DataError, match=told):
        subwords.read_subwords(tmp_path)


def test_the_pieces_of_a_unigram_are_not_drawn(tmp_path):
    pieces = [("<unk>", 0.0), ("t", -1.0), ("o", -1.0), ("to", -1.5), ("oo", -1.5), ("too", -2.0)]
    tokenizers.Tokenizer(Unigram(pieces, unk_id=0, alpha=0.1, nbest_size=64)).save(str(tmp_path / "tokenizer.json"))
    rules = subwords.read_subwords(tmp_path)
    assert len({tuple(rules.encode("tootoo" * 5).tolist()) for _ in range(20)}) == 1


@pytest.mark.parametrize("part", ["model", "post_processor"])
def test_a_panic_of_the_library_is_one_sentence_without_its_backtrace(tmp_path, capfd, part):
    rules = json.loads(words().to_str())
    broken = {
        "model": {"type": "BPE", "vocab": {"t": 0, "o": 1}, "merges": ["t o"]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
                           "pair": [], "special_tokens": {}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({**rules, part: broken[part]}))
    with pytest.raises(DataError, match=r"^data\.tokenizer = '.*': tokenizer\.json is not a tokenizer \(.*\)$"):
        subwords.read_subwords(tmp_path)
    assert capfd.readouterr().err == ""


def test_the_padding_of_a_file_is_not_ours(tmp_path):
    rules = words()
    rules.enable_padding(pad_id=3, pad_token="or", length=9)
    rules.save(str(tmp_path / "tokenizer.json"))
    assert subwords.read_subwords(tmp_path).encode("to be").tolist() == [1, 2]


def test_the_largest_id_is_the_last_of_those_that_are_read(tmp_path, monkeypatch):
    words().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(subwords, "MOST", 4)
    assert subwords.read_subwords(tmp_path).size == 4
    monkeypatch.setattr(subwords, "MOST", 3)
    with pytest.raises(DataError, match=r"tokenizer\.json has an id of 3, where 1 to 3 tokens are read$"):
        subwords.read_subwords(tmp_path)
