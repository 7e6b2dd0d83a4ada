"""Recipes: everything that an experiment depends on, as a validated table that prints every value in force."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, time
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fedflat.errors import RecipeError, nearest, shortened

PRESETS = ("default", "smoo", "sol", "man")
LONGEST_FILE, LONGEST_TEXT, DEEPEST = 2**20, 10_000, 16  # bytes of a file, characters of a value, levels of tables
DOTS = 200  # in a line
Draws = Literal["fedflat", "fedsol", "fl-simulator", "fedman"]
BufferPolicy = Literal["average", "local", "refuse"]


class Section(BaseModel):
    """A table of the recipe: immutable, without unknown fields or silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Named(Section):
    """A section that can also be written as a bare name: `data = "digits"`."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Data(Named):
    """Which samples, and how a batch of them is normalised and augmented."""

    name: str = Field("digits", description="data set, see `fedflat data list`")
    dir: str | None = Field(None, description="data directory; else $FEDFLAT_DATA, else the user's cache folder")
    normalise: bool = Field(True, description="(x − mean)/std of inputs in [0, 1]; false leaves them in [0, 1]")
    mean: list[float] | None = Field(None, description="channel means of inputs in [0, 1]; else the data set's")
    std: list[float] | None = Field(None, description="channel standard deviations; else the data set's")
    limit: int = Field(0, ge=0, description="training samples at most, drawn by the split's seed; 0 = all")
    crop: int = Field(0, ge=0, description="padding of a random crop; 0 = none")
    crop_probability: float = Field(1.0, ge=0, le=1, description="share of the samples that are cropped")
    crop_fill: Literal["black", "mean", "reflect"] = Field("black", description="what the padding holds")
    flip: float = Field(0.0, ge=0, le=1, description="probability of a horizontal flip")
    cutout: int = Field(0, ge=0, description="side of a square that is blanked; 0 = none")
    window: int = Field(0, ge=0, description="tokens of a sample of text; 0 = the data set's default")
    stride: int = Field(0, ge=0, description="tokens between two windows; 0 = 1 for `next`, the window for `all`")
    predict: Literal["next", "all"] = Field(
        "next", description="the token after a window, or the next one at every position of it"
    )
    words: int = Field(0, ge=0, description="words in the vocabulary of a text; 0 = characters")
    shortest: int = Field(0, ge=0, description="characters that a role or a file must have")
    by_length: bool = Field(False, description="batches of texts of similar length, with little padding")


class Split(Named):
    """Who holds which samples; federation/splits.py has the definitions under the same names."""

    name: str = Field("dirichlet", description="iid, dirichlet, lda, pathological, shards, natural or sizes")
    clients: int = Field(20, ge=0, le=1_000_000, description="number of clients m; 0 = one for each group (natural)")
    alpha: float | None = Field(None, gt=0, description="concentration (dirichlet, lda)")
    refill: bool | None = Field(None, description="draw with replacement (dirichlet)")
    min_size: int | None = Field(None, ge=1, description="smallest client (lda)")
    classes: int | None = Field(None, ge=1, description="classes of a client (pathological)")
    shards: int | None = Field(None, ge=1, description="shards of a client (shards)")
    stratified: bool | None = Field(None, description="equal class shares (iid)")
    sizes: list[float] | None = Field(None, description="relative sizes of the clients (sizes)")
    exponent: float | None = Field(None, description="power law of the sizes (sizes)")
    seed: int | None = Field(None, ge=0, description="seed of the partition; else the recipe's")
    draws: Draws = Field(
        "fedflat", description="who draws it: our code, or that of FedSoL, FedSMOO or MAN to the index"
    )

    def options(self) -> dict[str, Any]:
        """The options of the split: all fields except name, clients, seed and draws."""
        return self.model_dump(exclude={"name", "clients", "seed", "draws"}, exclude_none=True)


class Lora(Section):
    """Low-rank adapters: the layers that have them, their size, and how the server averages them."""

    rank: int = Field(8, ge=1, description="rank r of a layer's correction BA")
    alpha: float | None = Field(None, gt=0, description="α of its factor α/r; else 2r")
    targets: str | list[str] = Field(
        "attention", description="layers with an adapter: attention, head, all, or names and patterns"
    )
    also: str | list[str] = Field([], description="layers or parameters that are trained in full")
    average: Literal["factors", "product"] = Field("factors", description="average A and B, or the products BA")

    def options(self) -> dict[str, Any]:
        """The arguments of `fedflat.models.lora`."""
        return self.model_dump(exclude={"average"})


class Model(Named):
    """The network, by its name in the catalogue or as the import path `package.module:Class` of your own."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = Field("mlp", description="network, or package.module:Class; further fields are its options")
    buffers: BufferPolicy = Field("average", description="batch-norm statistics")
    base: str | None = Field(None, description="first weights: a run, an export or a .safetensors file; else drawn")
    base_sha256: str | None = Field(None, description="digest that the file of model.base must have")
    lora: Lora | None = Field(None, description="low-rank adapters to train in place of the network's weights")

    def options(self) -> dict[str, Any]:
        """The options passed to the network's constructor."""
        return dict(self.model_extra or {})


class Local(Section):
    """A client's work in a round."""

    epochs: int = Field(1, ge=1, description="passes over the client's samples")
    steps: int | None = Field(None, ge=1, description="number of steps instead of epochs")
    batch: int = Field(10, ge=0, description="batch size; 0 = all samples of the client")
    lr: float = Field(0.1, gt=0, description="learning rate η of round 0")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on η for each round")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum β, fresh in every round")
    nesterov: bool = Field(False, description="Nesterov's look ahead with the momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    clip: float = Field(0.0, ge=0, description="gradient norm to clip at; 0 = no clipping")
    clip_mode: Literal["loss_only", "official", "all"] = Field("loss_only", description="what the clip goes around")


class Server(Section):
    """The server's rounds: their number, cohorts and steps."""

    rounds: int = Field(30, ge=1, description="number of rounds")
    stop_loss: float | None = Field(
        None, gt=0, description="stop after the first evaluation whose mean training loss is below this"
    )
    cohort: int | float = Field(0.5, gt=0, description="clients of a round: a count, or a ratio below 1")
    sampling: Literal["uniform", "bernoulli"] = Field(
        "uniform", description="exactly the cohort, or each with that odds"
    )
    draws: Draws = Field("fedflat", description="who draws the cohorts: our code, or that of FedSoL, FedSMOO or MAN")
    average: Literal["uniform", "samples"] = Field("samples", description="weights of the average")
    lr: float = Field(1.0, gt=0, description="factor η_g on the server's move")


TrackerName = Literal["tensorboard", "mlflow", "wandb"]
Measure = Literal[
    "consistency", "divergence", "discord", "cosine", "proximal", "lambda", "local", "classes", "gradient", "margin",
    "local_sharpness", "local_curvature",
]  # fmt: skip


class Evaluation(Section):
    """When and on what the global model is scored."""

    every: int = Field(1, ge=0, description="rounds between evaluations; 0 = only after the last")
    on: Literal["test", "train"] = Field("test", description="which samples")
    model: Literal["server", "active", "all"] = Field(
        "server", description="which model: the server's, the mean of the round's clients, or of all clients' last ones"
    )
    batch: int = Field(500, ge=1, description="samples of a chunk")
    measures: list[Measure] = Field(
        ["consistency"], description="what to measure of each round's local models, as in docs/how-to.md"
    )
    metric: str | None = Field(
        None, description="the task's metric that tables, target and best checkpoint follow; else its first"
    )
    best: Literal["highest", "lowest"] = Field(
        "highest", description="which of its values is the best; set by the task"
    )
    margin: float = Field(1.0, ge=0, description="γ of the measure `margin`")
    radius: float = Field(0.05, gt=0, description="ρ of the measure `local_sharpness`")
    target: float | None = Field(None, description="value of the metric for `rounds to target`")
    sharpness: int = Field(
        0, ge=0, description="rounds between measurements of λ₁ by the clients' Hessian products; 0 = never"
    )
    sharpness_samples: int = Field(1000, ge=0, description="training samples of all clients for it; 0 = all")


class Admission(Section):
    """Which uploads are merged, and how a round continues without the others."""

    quorum: int = Field(1, ge=1, description="accepted clients below which a round is skipped")
    patience: int = Field(3, ge=1, description="skipped rounds in a row after which the run stops")
    failures: Literal["drop", "stop"] = Field(
        "drop", description="what a client that fails or is refused comes to: left out of its round, or the run stops"
    )
    deadline: float = Field(
        0.0, ge=0, description="seconds that a client's local round may take; 0 = as long as it wants"
    )
    max_norm: float = Field(1e6, gt=0, description="largest ‖Δ‖ of a client")
    max_ratio: float = Field(0.0, ge=0, description="largest ‖Δ‖ in units of the cohort's median; 0 = any")
    outlier: float = Field(
        50.0, ge=0, description="largest ‖Δ‖ in units of the cohorts' running median, for a mean client; 0 = any"
    )
    max_samples: int = Field(1_000_000_000, ge=1, description="largest number of samples that a client may claim")
    max_share: float = Field(
        10.0, ge=0, description="samples that count for a client of a deployment, in units of the median; 0 = all"
    )


class Checkpoint(Section):
    """How often a run with a directory is saved, so that a crash loses little."""

    every: int = Field(
        0, ge=0, description="rounds between checkpoints; 0 = as often as costs less than 3 % of the time"
    )
    keep: int = Field(
        0,
        ge=0,
        description="also keep the checkpoint of every n-th round, from round 0 on; 0 = the last two and the best",
    )


class Deployment(Section):
    """Settings of real deployments only (docs/deployment.md)."""

    nodes: int = Field(0, ge=0, description="connected clients to wait for before the first round; 0 = all of them")
    wait: float = Field(600.0, gt=0, description="seconds to wait for them")
    timeout: float = Field(3600.0, gt=0, description="seconds to wait for the replies of a round")
    memory: Literal["refuse", "anew"] = Field(
        "refuse", description="a client whose memory is lost or stale: refused, or it begins with none"
    )
    draws: Literal["secret", "recipe"] = Field(
        "secret", description="cohorts and samples' order by each side's secret, or to rehearse by the recipe's seed"
    )
    misses: int = Field(3, ge=1, description="rounds in a row without a reply after which a client is asked less often")
    metrics: int = Field(0, ge=0, le=65535, description="port of the server's /metrics for Prometheus; 0 = none")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address of this machine that it listens on")
    log: Literal["text", "json"] = Field("text", description="the server's log: sentences, or a JSON object a line")


class Engine(Named):
    """Where the clients' local rounds run."""

    name: Literal["auto", "inline", "pool", "ray"] = Field(
        "auto", description="this process, worker processes, or a Ray cluster"
    )
    workers: int = Field(0, ge=0, le=1024, description="worker processes; 0 = one for each core")
    address: str | None = Field(None, description="Ray cluster to join, as in 10.0.0.1:6379; else one of its own")
    device: Literal["cpu", "cuda", "mps"] = Field("cpu", description="where the clients train")
    group: int = Field(
        0, ge=0, le=1024, description="clients that share a step; 0 = by the model's size, 1 = one by one"
    )


class Recipe(Section):
    """An experiment. Equal recipes give bit-identical results on one kind of machine."""

    seed: int = Field(0, ge=0, description="seed of everything drawn")
    method: Any = Field("fedavg", description="a name, a sum such as 'feddyn + man(0.15)', a table or a list")
    task: str | None = Field(
        None,
        description="classification, regression, multi-label, next-token or package.module:Task; else the data set's",
    )
    precision: Literal["float32", "float64", "bf16"] = Field(
        "float32", description="numbers of weights and samples; bf16 computes passes in bfloat16, the rest in float32"
    )
    trackers: list[TrackerName] = Field([], description="who else is told of each round: tensorboard, mlflow, wandb")
    data: Data = Data()
    split: Split = Split()
    model: Model = Model()
    local: Local = Local()
    server: Server = Server()
    evaluation: Evaluation = Evaluation()
    admission: Admission = Admission()
    checkpoint: Checkpoint = Checkpoint()
    deployment: Deployment = Deployment()
    engine: Engine = Engine()

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def essentials(self) -> dict[str, Any]:
        """All fields that a run's numbers depend on: not the number of rounds, the checkpoints or the cores."""
        where = {"engine": {"name", "workers", "address"}, "data": {"dir"}, "model": {"base"}}
        aside = dict.fromkeys(("trackers", "checkpoint", "deployment"), True)
        return self.model_dump(exclude={"server": {"rounds", "stop_loss"}, **where, **aside})

    @property
    def metric(self) -> str:
        """The name of the metric that tables, targets and checkpoints follow."""
        return self.evaluation.metric or "accuracy"

    def rank(self, value: float) -> float:
        """Return a number that is larger the better a value of the metric is."""
        return value if self.evaluation.best == "highest" else -value

    def to_toml(self) -> str:
        """The recipe with every value in force; `load` reads it back."""
        top = {name: value for name, value in self if name not in SECTIONS}
        tables = (f"\n[{name}]\n{_lines(getattr(self, name).model_dump())}" for name in SECTIONS)
        return "".join([_lines(top), *tables])


TABLES = {"model.lora": Lora}  # tables inside of sections
SECTIONS = tuple(name for name, f in Recipe.model_fields.items() if isinstance(f.default, Section))


def load(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe from a file or a preset (default: the default recipe) and apply `section.field=value` overrides.

    A file can itself begin with `preset = "sol"` and state only what differs.

    >>> load("sol", ["local.lr=0.05"]).local.lr
    0.05
    """
    table = _read(source) if source is not None else {}
    return stacked(table, *map(parsed_override, overrides))


def stacked(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a table, which may name a preset as its base, and from further tables on top."""
    table = _preset(base.get("preset", "default"))
    for layer in ({name: value for name, value in base.items() if name != "preset"}, *layers):
        table = _merged(table, layer)
    return validated(table)


def overridden(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """Apply `section.field=value` overrides to a complete recipe."""
    table = recipe.model_dump(exclude_none=True)
    for override in overrides:
        table = _merged(table, parsed_override(override))
    return validated(table)


def validated(table: Mapping[str, Any]) -> Recipe:
    """Validate a table and return its recipe, or raise one sentence that says what is wrong."""
    _refuse_extremes(table)
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as error:
        # A field with two types is reported once for each type: one sentence per field is enough.
        sentences = {tuple(found["loc"][:2]): _sentence(found) for found in reversed(error.errors())}
        raise RecipeError(" ".join("; ".join(reversed(sentences.values())).split())) from None
    if isinstance(recipe.server.cohort, float) and recipe.server.cohort > 1:
        raise RecipeError(
            f"server.cohort = {recipe.server.cohort}: must be a whole count, or a ratio above 0 up to 1.0"
        )
    sampling = {"fedsol": "uniform", "fl-simulator": "bernoulli", "fedman": "bernoulli"}.get(recipe.server.draws)
    if sampling and recipe.server.sampling != sampling:
        raise RecipeError(
            f"server.draws = {recipe.server.draws!r}: those authors have server.sampling = {sampling!r} only; "
            "set it so, or server.draws = 'fedflat'"
        )
    if recipe.server.stop_loss is not None and not recipe.evaluation.every:
        raise RecipeError(
            f"server.stop_loss = {recipe.server.stop_loss}: the loss is looked at when the model is evaluated; "
            "set evaluation.every to 1 or more"
        )
    if not recipe.data.normalise and (set(recipe.data.mean or ()) - {0.0} or set(recipe.data.std or ()) - {1.0}):
        raise RecipeError("data.normalise = False: inputs stay in [0, 1], so leave data.mean and data.std out")
    return recipe


def _refuse_extremes(table: Mapping[str, Any]) -> None:
    """Refuse values that no field allows and that would overflow somewhere: NaN, huge numbers, deep nesting."""
    left: list[tuple[str, Any, int]] = [("", table, 0)]
    while left:
        path, value, depth = left.pop()
        name = path.removeprefix(".")
        if depth > DEEPEST:
            raise RecipeError(f"{shortened(name)}: is nested too deeply")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise RecipeError(f"{name} = {shortened(value)}: does not fit into 64 bits")
        if isinstance(value, float) and math.isnan(value):
            raise RecipeError(f"{name} = nan: is not a number")
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise RecipeError(f"{name}: has {len(value):,} characters, and {LONGEST_TEXT:,} are the most")
        if isinstance(value, Mapping):
            left += [(f"{path}.{shortened(key)}", inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(path, inner, depth + 1) for inner in value]


def _read(source: str | Path) -> dict[str, Any]:
    if str(source) in PRESETS:
        return {"preset": str(source)}
    try:
        return parsed(read_text(Path(source)), str(source))
    except FileNotFoundError:
        raise RecipeError(
            f"{source}: no such recipe file, and no preset of that name; {nearest(str(source), PRESETS)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{source}: cannot be read ({error})") from None


def read_text(path: Path) -> str:
    """Read a text file, up to a size limit."""
    with path.open("rb") as file:
        content = file.read(LONGEST_FILE + 1)
    if len(content) > LONGEST_FILE:
        raise RecipeError(f"{path}: has more than {LONGEST_FILE:,} bytes, too many for a recipe")
    return content.decode("utf-8")


def parsed(text: str, source: str) -> dict[str, Any]:
    """Parse TOML to a table; errors mention `source`."""
    # The time for a key of n dotted parts grows with n²: a small file could take minutes.
    if any(line.count(".") > DOTS for line in text.splitlines()):
        raise RecipeError(f"{source}: not valid TOML: a line has more than {DOTS} dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{source}: not valid TOML: {error}") from None
    except RecursionError:
        raise RecipeError(f"{source}: not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # such as a number with more digits than Python reads
        raise RecipeError(f"{source}: not valid TOML: {shortened(error)}") from None


def _preset(name: Any) -> dict[str, Any]:
    if name == "none":  # for a complete recipe: missing values stay missing
        return {}
    if name not in PRESETS:
        raise RecipeError(f"preset = {name!r}: there is none of that name; {nearest(str(name), PRESETS)}")
    return tomllib.loads((resources.files("fedflat") / "presets" / f"{name}.toml").read_text("utf-8"))


# What a section keeps when its name changes; all other fields are options of the old name.
LASTING = {
    "data": {"dir", "normalise", "crop", "crop_probability", "crop_fill", "flip", "cutout"},
    "split": {"clients", "seed", "draws"},
    "model": {"buffers"},
    "engine": {"workers", "address", "device", "group"},
}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` on top of `base`, section by section."""
    result = dict(base)
    for key, value in over.items():
        value = {"name": value} if key in LASTING and isinstance(value, str) else value
        old = result.get(key)
        if not (isinstance(value, Mapping) and isinstance(old, Mapping)):
            result[key] = value
        elif value.get("name", old.get("name")) == old.get("name"):
            result[key] = {**old, **value, **_tables(old, value)}
        else:
            result[key] = {**{k: v for k, v in old.items() if k in LASTING.get(key, ())}, **value}
    return result


def _tables(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The tables inside of two sections (`model.lora`), merged field by field."""
    both = {name: (old[name], new[name]) for name in old.keys() & new.keys()}
    return {k: {**a, **b} for k, (a, b) in both.items() if isinstance(a, Mapping) and isinstance(b, Mapping)}


def parsed_override(text: str) -> dict[str, Any]:
    """Parse `section.field=value` to a table."""
    path, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"--set {text}: write it as section.field=value, for example local.lr=0.05")
    if path.count(".") > DEEPEST:
        raise RecipeError(f"--set {shortened(text)}: there is no such field")
    try:
        given = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        given = value.strip()
    except (RecursionError, ValueError):
        raise RecipeError(f"--set {shortened(text)}: its value cannot be read") from None
    return nested(path.strip(), given)


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return a table with a value under a dotted path.

    >>> nested("split.alpha", 0.1)
    {'split': {'alpha': 0.1}}
    """
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def _sentence(error: ErrorDetails) -> str:
    """What is wrong with which field. The path is cut at the field: only branches of its type follow."""
    steps = [str(step) for step in error["loc"]]
    section, *inside = steps[: 2 if steps[0] in SECTIONS else 1]
    known = _fields(section) if inside else Recipe.model_fields
    path, name = ".".join([section, *inside]), (inside or [section])[0]
    if path in TABLES and len(steps) > 2:
        known, name, section = TABLES[path].model_fields, steps[2], path
        path = f"{path}.{name}"
    if error["type"] == "extra_forbidden":
        hint = nearest(name, known).replace("mean ", f"mean {section}." if inside else "mean ")
        return f"{path}: there is no such field; {hint}"
    meaning = f" ({known[name].description})" if known[name].description else ""
    return f"{path} = {shortened(repr(error['input']))}: {error['msg'][0].lower() + error['msg'][1:]}{meaning}"


def _fields(section: str) -> dict[str, FieldInfo]:
    default: Section = Recipe.model_fields[section].default
    return type(default).model_fields


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in table.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if (isinstance(value, float) and not math.isfinite(value)) or isinstance(value, date | time):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
