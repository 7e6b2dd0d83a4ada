"""A client's policy, in its own file: any request that goes beyond it is refused.

The server chooses the recipe and asks the questions. The client decides which recipe it accepts, and which questions it
answers, how often, over how many samples, and with how much privacy.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from fedflat.errors import FedflatError, RecipeError
from fedflat.methods import CentralPrivacy, Method, Privacy, parse, spell
from fedflat.recipe import Local, Recipe, Section, parsed, read_text

Question = Literal["hello", "train", "hessian", "curvature", "gradient", "rise", "margin"]
OURS = "fedflat"


class PolicyError(FedflatError):
    """A request that a client refuses, explained in one sentence; the reason is one of admission's words."""

    def __init__(self, sentence: str, reason: str = "policy") -> None:
        super().__init__(sentence)
        self.reason = reason


class Answers(Section):
    """How many questions of each kind the client answers in total, over all runs."""

    train: int = Field(10_000, ge=0, description="local rounds")
    hessian: int = Field(0, ge=0, description="Hessian products, each of which tells something about single samples")
    curvature: int = Field(0, ge=0, description="λ₁ of the client's own loss, a single number each")
    min_samples: int = Field(10, ge=1, description="samples that must be behind every answer")


class Insists(Section):
    """The minimum privacy that the client requires."""

    part: Literal["none", "central_dp", "local_dp"] = Field("none", description="part that the method must have")
    clip: float | None = Field(None, gt=0, description="largest clip C")
    noise: float = Field(0.0, ge=0, description="smallest noise multiplier z")
    epsilon: float | None = Field(None, gt=0, description="largest ε that all uploads together may come to")
    delta: float = Field(1e-5, gt=0, le=0.1, description="δ of that ε")

    @model_validator(mode="after")
    def _of_a_part(self) -> Insists:
        """Refuse a clip or noise without a part: it would have no effect."""
        if self.part == "none" and (self.noise or self.clip is not None):
            raise ValueError("clip and noise need a part: set part to local_dp or central_dp")
        return self


class Policy(Section):
    """A client's rules; the defaults apply without a file."""

    recipe: str = Field("", description="digest of the recipe; empty = the one that the app has when a run begins")
    code: list[str] = Field([], description="modules or package.module:Class beside fedflat's own that may be run")
    ledger: str = Field("", description="directory of the client's ledger, as seen from this file")
    answers: Answers = Answers()
    privacy: Insists = Insists()


def read_policy(path: Path | None) -> Policy:
    """Read the policy in a file; without a path, return the defaults.

    Raises:
        PolicyError: if the file is missing or not valid.
    """
    if path is None:
        return Policy()
    try:
        table = parsed(read_text(path), "not a policy")
    except (OSError, UnicodeDecodeError, RecipeError) as error:
        raise PolicyError(f"{path}: the client's policy cannot be read ({error})") from None
    try:
        return Policy.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise PolicyError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None


def client_side(recipe: Recipe) -> dict[str, Any]:
    """Return the part of a recipe that a client's answers depend on; the server alone chooses the rest."""
    rehearsed = recipe.deployment.draws == "recipe"
    told = {"measures", "margin", "radius", "sharpness", "sharpness_samples", "model"}
    return {
        "method": spell(recipe.method),
        "precision": recipe.precision,
        "data": recipe.data.model_dump(exclude={"dir"}),
        "split": recipe.split.model_dump(),
        "model": recipe.model.model_dump(),
        "local": recipe.local.model_dump(),
        "evaluation": recipe.evaluation.model_dump(include=told),
        "deployment": recipe.deployment.model_dump(include={"draws", "memory"}),
        "seed": recipe.seed if rehearsed else None,
        **({"task": recipe.task} if recipe.task else {}),
    }


def digest(recipe: Recipe) -> str:
    """Return the SHA-256 of what server and client agree on."""
    text = json.dumps(client_side(recipe), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_recipe(policy: Policy, recipe: Recipe, asked: Any) -> Method:
    """Return the recipe's method, if the client accepts the recipe and its privacy and the server uses the same one.

    Code is imported only after its name was found in the policy.

    Args:
        policy: the client's policy.
        recipe: the client's copy of the recipe.
        asked: the digest of the server's recipe.

    Raises:
        PolicyError: if the client does not accept the recipe, or the server uses another one.
    """
    own = digest(recipe)
    if policy.recipe and policy.recipe.removeprefix("sha256:") != own:
        raise PolicyError(f"recipe: its digest is {own}, but this client agreed to {policy.recipe}")
    if asked != own:
        raise PolicyError(f"recipe: the server's differs from this client's, which has the digest {own}")
    for name in named_code(recipe):
        if not {name, name.partition(":")[0]} & {*policy.code}:
            raise PolicyError(f"code: {name} is not part of fedflat, and this client's policy does not list it")
    method = parse(recipe.method)
    check_privacy(policy.privacy, method)
    return method


def named_code(recipe: Recipe) -> list[str]:
    """Return the import paths in a recipe that lead outside fedflat."""
    names = [str(name) for name in (recipe.model.name, recipe.data.name) if ":" in str(name)]
    names += re.findall(r"[\w.]+:\w+", f"{spell(recipe.method)} {recipe.task or ''}")
    return [name for name in names if name.split(":")[0].split(".")[0] != OURS]


def check_privacy(least: Insists, method: Method) -> None:
    """Check that the method protects its uploads as much as the client requires.

    Raises:
        PolicyError: if it does not.
    """
    guard = method.protection
    if least.part == "none":
        return
    central = isinstance(guard, CentralPrivacy)
    if not isinstance(guard, Privacy) or (central and least.part == "local_dp"):
        raise PolicyError(f"privacy: this client requires {least.part}, which the method does not have")
    if not guard.noise or guard.noise < least.noise:
        raise PolicyError(f"privacy: noise = {guard.noise:g} is below this client's minimum, {least.noise:g}")
    if least.clip is not None and guard.clip > least.clip:
        raise PolicyError(f"privacy: clip = {guard.clip:g} is above this client's maximum, {least.clip:g}")
    try:
        guard.refuse_seeded()
    except RecipeError as error:
        raise PolicyError(f"privacy: {error}") from None


def check_question(policy: Policy, question: Question, recipe: Recipe, method: Method, samples: int) -> None:
    """Check that the policy and the recipe allow this kind of question, over this number of samples.

    Raises:
        PolicyError: if they do not.
    """
    if question not in ("hello", "train"):
        if isinstance(method.protection, Privacy):
            raise PolicyError(f"{question}: a private method answers no question that its noise does not protect")
        if question not in measured_questions(recipe):
            raise PolicyError(f"{question}: the recipe does not measure it")
    least = policy.answers.min_samples
    if samples < least:
        raise PolicyError(f"{question}: the answer would use only {samples} samples, answers.min_samples = {least}")


def measured_questions(recipe: Recipe) -> set[Question]:
    """Return the questions about its loss that the recipe asks a client of a deployment.

    >>> from fedflat.recipe import load
    >>> measured_questions(load(None, ["evaluation.sharpness=5"]))
    {'hessian'}
    """
    hessian: set[Question] = {"hessian"} if recipe.evaluation.sharpness else set()
    return hessian | {"curvature"} if "local_curvature" in recipe.evaluation.measures else hessian


def behind(local: Local, samples: int) -> int:
    """Return how many of a client's samples enter its update: few steps over small batches do not see all of them.

    >>> behind(Local(steps=2, batch=8), 100), behind(Local(epochs=1, batch=8), 100)
    (16, 100)
    """
    return min(samples, local.steps * local.batch) if local.steps and local.batch else samples


def cost(method: Method, least: Insists) -> float:
    """Return what one upload adds to Σ 1/σ² in a client's ledger; σ is its noise relative to what it hides.

    Gaussian mechanisms compose to one with 1/σ² = Σ 1/σᵢ². An upload without noise has infinite cost. So has one to
    which only the server adds noise, unless the client has agreed to trust it: part = "central_dp".
    """
    guard = method.protection
    unseen = isinstance(guard, CentralPrivacy) and least.part != "central_dp"
    if not isinstance(guard, Privacy) or not guard.noise or unseen:
        return float("inf")
    return (2 / guard.noise) ** 2


def epsilon(spent: float, delta: float) -> float:
    """Return the ε at δ of one Gaussian mechanism with 1/σ² = spent."""
    if spent == float("inf"):
        return spent
    try:
        import dp_accounting
    except ImportError:
        raise PolicyError("privacy.epsilon: the ledger needs dp-accounting; pip install 'fedflat[privacy]'") from None
    return float(dp_accounting.get_epsilon_gaussian(spent**-0.5, delta)) if spent else 0.0
