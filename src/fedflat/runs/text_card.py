"""What an exported network for text needs beside its weights: the vocabulary, and code from texts to token ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from fedflat.federation import WORD, Subwords, Tokenizer, tokenizer_table

if TYPE_CHECKING:
    from fedflat.runs.export import Signature

VOCABULARY, CONFIG, TOKENIZER = "vocabulary.json", "config.json", "tokenizer.json"
HUB = "transformers"  # the name of their models in a recipe
PIECES = {"character": "list(text)", "word": f're.findall(r"{WORD}", text.lower())'}
OURS = """\
numbers = {token: number for number, token in enumerate(vocabulary["tokens"])}


def encoded(text):
    pieces = PIECES
    ids = [numbers.get(piece, vocabulary["unknown"]) for piece in pieces]"""
THEIRS = f"""\
tokenizer = Tokenizer.from_file("{TOKENIZER}")  # next to this card
tokenizer.no_padding()
tokenizer.no_truncation()


def encoded(text):
    ids = tokenizer.encode(text).ids"""


def vocabulary_bytes(tokenizer: Tokenizer, labels: tuple[str, ...]) -> bytes:
    """The file with the token of each id, and the name of each class unless classes are tokens."""
    known = tokenizer_table(tokenizer)
    if isinstance(tokenizer, Subwords):
        known = {"unit": tokenizer.unit, "tokens": tokenizer.tokens}  # its rules are in a file of their own
    table = {**known, **({"labels": labels} if labels else {})}
    return f"{json.dumps(table, ensure_ascii=False)}\n".encode()


def imports_code(signature: Signature) -> str:
    """The imports of `tokens_code`, to the end of their last line."""
    if not signature.tokenizer:
        return ""
    return "import json\nimport re\n\n" if signature.tokenizer.unit == "word" else "import json\n\n"


def tokenizers_code(signature: Signature) -> str:
    """The import of `tokenizers`, if the tokens need it."""
    theirs = isinstance(signature.tokenizer, Subwords)
    return "from tokenizers import Tokenizer  # pip install tokenizers\n" if theirs else ""


def tokens_code(signature: Signature) -> str:
    """Plain Python that makes `tokens` of `texts`, as in training; empty if the data were token ids."""
    if not signature.tokenizer:
        return ""
    (length,) = signature.shape
    # Labelled texts were cut at their end. A text that goes on is predicted from its last tokens.
    kept = f"[-{length}:]" if signature.language else f"[:{length}]"
    unit = signature.tokenizer.unit
    made = OURS.replace("PIECES", PIECES[unit]) if unit in PIECES else THEIRS
    return f"""\
with open("{VOCABULARY}", encoding="utf-8") as file:
    vocabulary = json.load(file)
{made}{kept}
    return ids + [-1] * ({length} - len(ids))


texts = ["To be, or not to be", "I know not", "What say you", "Come hither"]  # yours
tokens = torch.tensor([encoded(text) for text in texts])"""


def answer_code(signature: Signature) -> str:
    """Plain Python that names what `logits` predict: the class of each text, or its next token."""
    if not signature.tokenizer:
        return ""
    last = "logits[torch.arange(len(tokens)), (tokens >= 0).sum(dim=1) - 1]" if signature.per_token else "logits"
    names = "tokens" if signature.language else "labels"
    return f'predicted = [vocabulary["{names}"][k] for k in {last}.argmax(dim=1)]\n'


def config_bytes(module: Any) -> bytes:
    """The configuration of a model of `transformers`, without the path that it came from."""
    fields = {name: value for name, value in module.config.to_dict().items() if name != "_name_or_path"}
    last = module.get_output_embeddings()
    # Adapters of a tied layer are merged into a weight of its own.
    if last is not None and last.weight is not module.get_input_embeddings().weight:
        fields["tie_word_embeddings"] = False
    return f"{json.dumps(fields, indent=1, sort_keys=True, default=str)}\n".encode()


def hub_code(signature: Signature) -> tuple[str, str]:
    """The imports for a model of `transformers`, and the code that builds it from its files as a function of tokens."""
    head = "TokenClassification" if signature.per_token else "SequenceClassification"
    kind = f"AutoModelFor{'CausalLM' if signature.per_token and signature.language else head}"
    double = ".double()" if signature.dtype == torch.float64 else ""
    return (
        f"from transformers import AutoConfig, {kind}",
        f"""\
network = {kind}.from_config(AutoConfig.from_pretrained(".")){double}  # {CONFIG} is next to this card
network.load_state_dict(load_file("model.safetensors"))
network.eval()


def model(tokens):
    there = tokens >= 0
    ids = torch.where(there, tokens, network.config.pad_token_id or 0)
    return network(input_ids=ids, attention_mask=there.long()).logits[..., :{signature.classes}]
""",
    )
