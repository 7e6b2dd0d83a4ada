"""What an exported network for text needs beside its weights: the vocabulary, and code from texts to token ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fedflat.federation import WORD, Tokenizer, tokenizer_table

if TYPE_CHECKING:
    from fedflat.runs.export import Signature

VOCABULARY = "vocabulary.json"
PIECES = {"character": "list(text)", "word": f're.findall(r"{WORD}", text.lower())'}


def vocabulary_bytes(tokenizer: Tokenizer, labels: tuple[str, ...]) -> bytes:
    """The file with the token of each id, and the name of each class unless classes are tokens."""
    table = {**tokenizer_table(tokenizer), **({"labels": labels} if labels else {})}
    return f"{json.dumps(table, ensure_ascii=False)}\n".encode()


def imports_code(signature: Signature) -> str:
    """The imports of `tokens_code`, to the end of their last line."""
    if not signature.tokenizer:
        return ""
    return "import json\nimport re\n\n" if signature.tokenizer.unit == "word" else "import json\n\n"


def tokens_code(signature: Signature) -> str:
    """Plain Python that makes `tokens` of `texts`, as in training; empty if the data were token ids."""
    if not signature.tokenizer:
        return ""
    (length,) = signature.shape
    # Labelled texts were cut at their end. A text that goes on is predicted from its last tokens.
    kept = f"[:{length}]" if signature.labels else f"[-{length}:]"
    return f"""\
with open("{VOCABULARY}", encoding="utf-8") as file:
    vocabulary = json.load(file)
numbers = {{token: number for number, token in enumerate(vocabulary["tokens"])}}


def encoded(text):
    pieces = {PIECES[signature.tokenizer.unit]}
    ids = [numbers.get(piece, vocabulary["unknown"]) for piece in pieces]{kept}
    return ids + [-1] * ({length} - len(ids))


texts = ["To be, or not to be", "I know not", "What say you", "Come hither"]  # yours
tokens = torch.tensor([encoded(text) for text in texts])"""


def answer_code(signature: Signature) -> str:
    """Plain Python that names what `logits` predict: the class of each text, or its next token."""
    if not signature.tokenizer:
        return ""
    last = "logits[torch.arange(len(tokens)), (tokens >= 0).sum(dim=1) - 1]" if signature.per_token else "logits"
    names = "labels" if signature.labels else "tokens"
    return f'predicted = [vocabulary["{names}"][k] for k in {last}.argmax(dim=1)]\n'
