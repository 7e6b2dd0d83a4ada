"""The model card: what a model is, how it was trained, its accuracy, how to load it, and its limits."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from fedflat.errors import printable
from fedflat.federation import Federation
from fedflat.methods import CATALOGUE
from fedflat.models import MODELS, construction
from fedflat.recipe import Recipe
from fedflat.runs.own_classes import OWN
from fedflat.runs.text_card import (
    HUB,
    VOCABULARY,
    answer_code,
    hub_code,
    imports_code,
    tokenizers_code,
    tokens_code,
)

if TYPE_CHECKING:
    from fedflat.runs.export import Signature

Facts = Mapping[str, Any]


def card(
    federation: Federation, recipe: Recipe, signature: Signature, standing: Facts, digests: Mapping[str, str]
) -> str:
    """The model card as Markdown, with the front matter for model hubs.

    Args:
        federation: the data of the run.
        recipe: the recipe, without paths of the machine.
        signature: the inputs and outputs of the model.
        standing: the summary of the run.
        digests: the SHA-256 of each file, by name.
    """
    title = f"{recipe.model.name} on {recipe.data.name}, by {recipe.method}"
    sections = {
        "Data": _data(federation, recipe),
        "Method": _method(recipe),
        "Accuracy": _accuracy(federation, recipe, standing),
        "Use": _use(signature, "model.onnx" in digests),
        "Limits": _limits(recipe, signature, standing),
        "Recipe": f"```toml\n{recipe.to_toml()}```",
        "Files": _files(standing, digests),
    }
    language = "language model (it predicts the next token)"
    kind = language if signature.language else "classifier" if _classifies(federation) else "regressor"
    intro = f"A {kind}, trained by federated learning: {standing['rounds']} rounds with {federation.clients} clients."
    body = "".join(f"\n## {name}\n\n{text}\n" for name, text in sections.items())
    return f"---\n{_front_matter(federation, recipe, signature, standing)}---\n\n# {title}\n\n{intro}\n{body}"


def _classifies(federation: Federation) -> bool:
    return federation.dataset.train.labels.dtype == torch.int64


def _score(recipe: Recipe, standing: Facts) -> str:
    return f"{recipe.metric} on the {recipe.evaluation.on} samples after round {standing['rounds']}"


def _terms(recipe: Recipe) -> list[str]:
    """The catalogue names in the text of a method."""
    return [term.partition("(")[0] for term in str(recipe.method).split(" + ")]


def _hub_task(federation: Federation, signature: Signature) -> str:
    """The task by its name on model hubs."""
    if signature.language:
        return "text-generation"
    text = "token" if signature.per_token else "text"
    kind = text if signature.vocabulary else "image" if signature.images else "tabular"
    return f"{kind}-classification" if _classifies(federation) else f"{kind}-regression"


def _front_matter(federation: Federation, recipe: Recipe, signature: Signature, standing: Facts) -> str:
    """YAML front matter. The values are JSON, which is valid YAML with safe quoting."""
    task = _hub_task(federation, signature)
    data = {"name": recipe.data.name, "type": recipe.data.name, "split": recipe.evaluation.on}
    score = standing.get(f"{recipe.metric}_last")
    fields: dict[str, Any] = {
        "license": "unknown",
        "library_name": "pytorch",
        "pipeline_tag": task,
        "tags": ["federated-learning", "fedflat", *_terms(recipe)],
        "datasets": [recipe.data.name],
    }
    if score is not None:
        metric = {"type": recipe.metric, "value": score, "name": _score(recipe, standing)}
        result = {"task": {"type": task}, "dataset": data, "metrics": [metric]}
        fields |= {"metrics": [recipe.metric], "model-index": [{"name": recipe.model.name, "results": [result]}]}
    return "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in fields.items())


def _data(federation: Federation, recipe: Recipe) -> str:
    sizes = [federation.samples(client) for client in range(federation.clients)]
    options = ", ".join(f"{name} = {value}" for name, value in recipe.split.options().items())
    how = "made in Python" if recipe.split.name == "given" else f"`{recipe.split.name}`{options and f' ({options})'}"
    kinds = f" of {federation.dataset.classes} classes, counted from 0" if _classifies(federation) else ""
    return (
        f"`{recipe.data.name}`: {federation.size('train')} training and {federation.size('test')} test samples"
        f"{kinds}. The split among {federation.clients} clients is {how}; "
        f"they hold {min(sizes)} to {max(sizes)} samples each."
    )


def _method(recipe: Recipe) -> str:
    lines = [f"`{recipe.method}`, every parameter with its value.", ""]
    for name in _terms(recipe):
        entry = CATALOGUE.get(name)
        says = f"{entry.idea}. {entry.paper}, *{entry.title}*." if entry else "a custom part."
        lines.append(f"- **{name}**: {says}")
    return "\n".join(lines)


def _accuracy(federation: Federation, recipe: Recipe, standing: Facts) -> str:
    name, on = recipe.metric, recipe.evaluation.on
    last = standing.get(f"{name}_last")
    if last is None:
        return "This model was not evaluated."
    rows = [(f"**this model**, after round {standing['rounds']}", f"**{last:.4f}**")]
    best, at = standing.get(f"{name}_best"), standing.get(f"{name}_best_round", standing["rounds"])
    if best is not None and at != standing["rounds"]:
        rows.append((f"best model of the run (not this one), after round {at}", f"{best:.4f}"))
    if (mean := standing.get(f"{name}_mean_of_last_10")) is not None:
        rows.append(("mean of the last ten evaluations of the run", f"{mean:.4f}"))
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return (
        f"| | {on} {name} |\n|---|---|\n{table}\n\n"
        f"From one run with seed {recipe.seed}, on the {federation.size(on)} {on} samples."
    )


def _use(signature: Signature, onnx: bool) -> str:
    shape = ", ".join(map(str, signature.shape))
    parts = [
        f"Input: `{signature.name}` of shape (N, {shape}), {signature.meaning}. "
        f"Output: `logits` of shape (N, {f'{shape}, ' if signature.per_token else ''}{signature.classes}).",
        f"In plain PyTorch:\n\n```python\n{_torch_code(signature)}```",
    ]
    if not signature.plain:
        parts.append(
            "`model.safetensors` holds the network without its normalisation: alone it takes (x − mean)/std with "
            f"mean {[*signature.mean]} and std {[*signature.std]}. `Normalised` adds it, as above."
        )
    included = "" if signature.plain else " (the file includes the normalisation)"
    if onnx:
        parts.append(f"In ONNX Runtime{included}:\n\n```python\n{_onnx_code(signature)}```")
    return "\n\n".join(parts)


def _torch_code(signature: Signature) -> str:
    imports, built = hub_code(signature) if signature.model == HUB else _built_code(signature)
    shape = ", ".join(map(str, signature.shape))
    drawn = f"torch.rand(4, {shape}, dtype={signature.dtype})"
    if signature.vocabulary:
        drawn = f"torch.randint({signature.vocabulary}, (4, {shape}))"
    given = f"{signature.name} = {drawn}  # yours: {signature.meaning}"
    return f"""\
{imports_code(signature)}import torch
from safetensors.torch import load_file
{tokenizers_code(signature)}{imports}

{built}

{tokens_code(signature) or given}
with torch.no_grad():
    logits = model({signature.name})
{answer_code(signature)}"""


def _built_code(signature: Signature) -> tuple[str, str]:
    """The imports of the network, and the code that builds it with its weights as `model`."""
    kind = signature.shape, signature.classes, signature.options, signature.vocabulary, signature.per_token
    builder, arguments = construction(signature.model, *kind)
    ours = signature.model in MODELS or OWN.match(signature.model)
    wrapper = [] if signature.plain else ["Normalised"]
    theirs = (
        "" if ours else f"from {signature.model.partition(':')[0]} import {builder.__name__}  # of whoever trained it"
    )
    names = ", ".join([*wrapper, *([builder.__name__] if ours else [])])
    imports = [f"from network import {names}  # network.py is next to this card"] if names else []
    call = f"{builder.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    double = ".double()" if signature.dtype == torch.float64 else ""
    images = "" if signature.images else ", images=False"
    model = f"Normalised(network, mean={[*signature.mean]}, std={[*signature.std]}{images})" if wrapper else "network"
    return (
        "\n" + "\n".join([*imports, *([theirs] if theirs else [])]),
        f"""\
network = {call}{double}
network.load_state_dict(load_file("model.safetensors"))
model = {model}.eval()""",
    )


def _onnx_code(signature: Signature) -> str:
    shape = ", ".join(map(str, signature.shape))
    drawn = f"np.random.rand(4, {shape}).astype(np.{str(signature.dtype).removeprefix('torch.')})"
    if signature.vocabulary:
        ours = "np.array([encoded(text) for text in texts])"
        drawn = ours if signature.tokenizer else f"np.random.randint({signature.vocabulary}, size=(4, {shape}))"
    return f"""\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
{signature.name} = {drawn}  # {"as above" if signature.tokenizer else "yours"}
(logits,) = session.run(None, {{"{signature.name}": {signature.name}}})
"""


def _limits(recipe: Recipe, signature: Signature, standing: Facts) -> str:
    lines = [
        "It was trained and tested only on samples of this data set.",
        f"The {recipe.metric} above is from one run with one seed; other seeds give other values.",
        "Its licence depends on the data; the publisher must state it.",
    ]
    if (epsilon := standing.get("epsilon")) is not None:
        lines.append(f"It is differentially private with ε = {epsilon:.3g}, for the δ of its method.")
    elif not {"central_dp", "local_dp"} & {*_terms(recipe)}:
        lines.append("It is not differentially private: it may reveal information about single training samples.")
    theirs = recipe.data.name == "shakespeare" or recipe.data.tokenizer  # LEAF's alphabet and a tokenizer are fixed
    if signature.tokenizer and not theirs:
        unit = signature.tokenizer.unit
        lines.append(f"`{VOCABULARY}` lists {unit}s of the training texts, which no privacy mechanism protects.")
    if recipe.model.name == "resnet18":
        lines.append("Its batch norm uses the statistics of the batch: an output depends on the other samples in it.")
    return "\n".join(f"- {line}" for line in lines)


def _files(standing: Facts, digests: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {name} | `{digest}` |" for name, digest in digests.items())
    here = {"fedflat": version("fedflat"), "torch": torch.__version__, "python": platform.python_version()}
    trained = standing.get("versions", {})
    versions = [f"| {name} | {printable(trained.get(name, ''), 40)} | {number} |" for name, number in here.items()]
    table = "\n".join(["| | trained with | exported with |", "|---|---|---|", *versions])
    return f"| file | SHA-256 |\n|---|---|\n{rows}\n\n{table}"
