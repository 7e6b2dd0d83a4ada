"""Language models of `transformers`, from a configuration or a local folder; nothing is ever downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedflat.errors import RecipeError, nearest, shortened
from fedflat.models.networks import Shape


def transformers(
    shape: Shape,
    classes: int,
    vocabulary: int,
    per_token: bool = False,
    config: Mapping[str, Any] | None = None,
    folder: str | None = None,
) -> nn.Module:
    """Build a model of the `transformers` library: one that predicts every next token, or classifies tokens or texts.

    If every token has an output and the classes are the tokens, the model predicts the next token, and must not see it:
    models that read in both directions, such as BERT, become decoders or are refused.

    It is built from a configuration, with random weights, or from a folder in the hub's format with config.json and
    model.safetensors. Names of models on the hub are refused: nothing is downloaded. Code in a folder is never run,
    and weights are only read from safetensors. A classifier gets a new head if the folder has none, or one for another
    number of classes; all other weights must be in the folder.

    Args:
        shape: shape of a sample: the number of tokens.
        classes: number of outputs.
        vocabulary: number of tokens.
        per_token: whether every token has an output: a class, or the next token if there are as many classes as tokens.
        config: `model_type` ("gpt2", "bert" …) and the fields of its configuration; the vocabulary follows from the
            data.
        folder: a local folder.

    Raises:
        RecipeError: the library is not installed, or the model cannot be built.
    """
    if not find_spec("transformers"):
        raise RecipeError("model transformers needs one more package: pip install 'fedflat[transformers]'")
    if (config is None) == (folder is None):
        raise RecipeError("model transformers: give it either a config or a folder")
    if not vocabulary:
        raise RecipeError("model transformers: takes token ids, and this data set has none")
    with _quiet():
        settings = _from_folder(folder, vocabulary) if folder else _from_config(config or {}, vocabulary, per_token)
    _refuse_short(settings, shape)
    settings.num_labels = classes
    if not per_token or classes != vocabulary:
        return _built(settings, folder, "TokenClassification" if per_token else "SequenceClassification")
    if hasattr(settings, "is_decoder"):
        settings.is_decoder = True
    module = _built(settings, folder, "CausalLM")
    with _quiet():
        looks_ahead = _looks_ahead(module, shape[0], vocabulary)
    if looks_ahead:
        raise RecipeError(f"model transformers: {settings.model_type} sees the tokens that it would have to predict")
    return module


def _from_config(config: Mapping[str, Any], vocabulary: int, per_token: bool) -> Any:
    from transformers import CONFIG_MAPPING

    fields = dict(config)
    kind = str(fields.pop("model_type", ""))
    if kind not in CONFIG_MAPPING:
        raise RecipeError(f"model.config.model_type = {kind!r}: is none of transformers' own (such as gpt2 or bert)")
    # Classifiers such as GPT-2 find the last token of a text by the padding after it, so the padding is a new token.
    own = {} if per_token else {"pad_token_id": vocabulary}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    try:
        known = CONFIG_MAPPING[kind]()
        for name in fields:
            if not hasattr(known, name):  # the library would keep it, and use it nowhere
                raise RecipeError(f"model.config.{name}: {kind} has no such field; {nearest(name, known.to_dict())}")
        settings = CONFIG_MAPPING[kind](**{"vocab_size": vocabulary + len(own), **ends, **own, **fields})
        if settings.vocab_size < vocabulary:
            raise RecipeError(f"model.config.vocab_size = {settings.vocab_size}: the data has {vocabulary} tokens")
        return _prepared(settings)
    except RecipeError:
        raise
    except Exception as error:  # each of the library's models refuses in its own way
        raise RecipeError(f"model.config: {_first_line(error)}") from None


def _from_folder(folder: str, vocabulary: int) -> Any:
    from transformers import AutoConfig

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise RecipeError(
            f"model.folder = {folder!r}: is not a local folder with a config.json; nothing is downloaded, so get the "
            "model first (`hf download NAME --local-dir FOLDER`)"
        )
    if not any(path.glob("*.safetensors")):
        raise RecipeError(f"model.folder = {folder!r}: holds no .safetensors, and other formats are not read")
    try:
        settings = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each of the library's models refuses in its own way
        raise RecipeError(f"model.folder = {folder!r}: its config.json cannot be read ({_first_line(error)})") from None
    if not isinstance(getattr(settings, "vocab_size", None), int):
        raise RecipeError(f"model.folder = {folder!r}: its config.json has no vocab_size; is it a model of texts?")
    if settings.vocab_size < vocabulary:
        raise RecipeError(
            f"model.folder = {folder!r}: knows {settings.vocab_size} tokens, and the data has {vocabulary}; "
            "take the folder's tokenizer.json by data.tokenizer"
        )
    return _prepared(settings)


def _prepared(settings: Any) -> Any:
    # Only the plain attention has second derivatives, and a training step does not need a cache.
    settings._attn_implementation = "eager"
    settings.use_cache = False
    ends = [getattr(settings, name, None) for name in ("pad_token_id", "eos_token_id")]
    # Configurations with a small vocabulary may keep the ids of a large one.
    known = (token for token in ends if isinstance(token, int) and 0 <= token < settings.vocab_size)
    settings.pad_token_id = next(known, 0)
    return settings


def _refuse_short(settings: Any, shape: Shape) -> None:
    most = getattr(settings, "max_position_embeddings", None)
    if len(shape) != 1 or (most is not None and 0 < most < shape[0]):  # XLNet says -1 for any length
        raise RecipeError(f"model transformers: reads up to {most} tokens, and a sample has the shape {tuple(shape)}")


def _looks_ahead(module: nn.Module, length: int, vocabulary: int) -> bool:
    """Whether another last token changes the logits of those before it."""
    texts = torch.zeros(2, length, dtype=torch.long)
    texts[1, -1] = vocabulary - 1
    training = module.training
    with torch.no_grad():
        one, other = module.eval()(input_ids=texts).logits
    module.train(training)
    return not torch.allclose(one[:-1], other[:-1], rtol=1e-4, atol=1e-6)


def _built(settings: Any, folder: str | None, head: str) -> nn.Module:
    import transformers

    kind: Any = getattr(transformers, f"AutoModelFor{head}")
    try:
        with _quiet():
            module: nn.Module
            if folder is None:
                module = kind.from_config(settings, trust_remote_code=False)
                return module
            module, found = kind.from_pretrained(
                Path(folder),
                config=settings,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # each of the library's models refuses in its own way
        source = "model.config" if folder is None else f"model.folder = {folder!r}"
        raise RecipeError(f"{source}: the model cannot be built ({_first_line(error)})") from None
    _refuse_new(module, found, folder, head)
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise RecipeError(f"model.folder = {folder!r}: {name} has a number that is not finite")
    return module


def _refuse_new(module: nn.Module, found: Mapping[str, Any], folder: str, head: str) -> None:
    """Refuse a model some of whose weights the folder does not have: the library would draw them at random."""
    new = {*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])}
    if head != "CausalLM":
        body = f"{getattr(module, 'base_model_prefix', '')}."
        # The pooler belongs to the classifier's head: language models are saved without one.
        new = {name for name in new if name.startswith(body) and ".pooler." not in name}
    if new:
        first = shortened(", ".join(sorted(new)))
        raise RecipeError(f"model.folder = {folder!r}: its config.json asks for weights that it does not hold: {first}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's progress bars and its warnings about new heads."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
