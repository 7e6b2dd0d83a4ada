"""Claim files: what a paper says, as hypotheses about the runs of studies.

A claim file (`claims/NAME.toml`) has the paper's words and numbers, and one `[[part]]` for each hypothesis::

    title = "MAN lowers the top eigenvalue at no loss of accuracy"
    paper = "Yashwanth et al. 2025"
    printed = "FedAvg on CIFAR-100: λ₁ from 51.49 to 43.8"
    here = "Fashion-MNIST in place of CIFAR-100, 40 of 500 rounds"
    study = "fashion-mlp"                      # a sweep file in claims/studies

    [[part]]
    name = "λ₁"
    quantity = "lambda1"                       # a column of the sweep's results, or one of `DERIVED`
    of = { method = "fedavg + man(0.15)" }     # grid values of the runs in question
    against = { method = "fedavg" }            # and of those they are paired with, seed by seed
    direction = "lower"
    compare = "ratio"                          # or "difference", the default
    bound = 1.0                                # what the effect must stay below; 0 for differences by default

A study is a plain sweep file; several claims can look at the runs of one study. `pilot = [0, 1, 2]` names seeds that
were looked at before the number of seeds was decided; they do not count for the verdict. In place of parts a claim may
have a `[ranking]`: measures that should rank the runs of its studies as another quantity does.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from fedflat.errors import RecipeError, nearest, shortened
from fedflat.recipe import Section, read_table
from fedflat.runs.claims.evidence import digest
from fedflat.runs.claims.verdict import Direction, Need
from fedflat.runs.shipped import shipped_folder
from fedflat.runs.sweep.grid import load_sweep
from fedflat.runs.sweep.plan import Point, Sweep

FEWEST = 3  # runs that a ranking needs
Values = dict[str, Any]


class Part(Section):
    """One hypothesis: the effect on a quantity between two groups of runs, and where it should lie."""

    name: str = Field(min_length=1)
    quantity: str = Field(min_length=1)
    of: Values
    against: Values | None = None
    against_quantity: str | None = None
    direction: Direction
    compare: Literal["difference", "ratio"] = "difference"
    bound: float | None = Field(None, allow_inf_nan=False)
    target: float | None = Field(None, allow_inf_nan=False)
    study: str | None = None
    printed: str = ""

    @model_validator(mode="after")
    def _sensible(self) -> Part:
        if (self.quantity == "rounds_to_target") != (self.target is not None):
            raise ValueError("a target belongs to the quantity rounds_to_target, and that needs one")
        if self.against_quantity and self.against is None:
            raise ValueError("against_quantity belongs to the runs of `against`, which are missing")
        if self.of == self.against and (self.against_quantity or self.quantity) == self.quantity:
            raise ValueError("`of` and `against` are the same runs, so there is no effect")
        if self.compare == "ratio" and self.bound is not None and self.bound <= 0:
            raise ValueError("the bound of a ratio is above 0")
        return self

    @property
    def limit(self) -> float:
        """The bound, or its default: no effect."""
        return self.bound if self.bound is not None else float(self.compare == "ratio")


class Ranking(Section):
    """Measures, each of which should rank the runs of a study as a quantity does (Kendall's τ within each seed).

    Those in `beside` are shown for comparison and do not affect the verdict.
    """

    quantity: str = Field(min_length=1)
    measures: list[str] = Field(min_length=1)
    beside: list[str] = Field(default=[])
    studies: list[str] = Field(min_length=1)
    bound: float = Field(0.0, gt=-1, lt=1)

    @model_validator(mode="after")
    def _different(self) -> Ranking:
        ranked = [self.quantity, *self.measures, *self.beside]
        for name, some in (("quantity, measures and beside", ranked), ("studies", self.studies)):
            if twice := next((each for each in some if some.count(each) > 1), None):
                raise ValueError(f"{shortened(twice)!r} is named twice in {name}")
        if "rounds_to_target" in ranked:
            raise ValueError("a ranking cannot use rounds_to_target, which needs a target")
        return self


class Claim(Section):
    """What a paper says, where it says it, what it prints, and how it is tested here."""

    name: str
    title: str = Field(min_length=1)
    paper: str = Field(min_length=1)
    says: str = ""
    printed: str = ""
    here: str = Field(min_length=1)
    notes: list[str] = Field(default=[])
    study: str | None = None
    pilot: list[int] = Field(default=[])
    need: Need = "all"
    part: list[Part] = Field(default=[])
    ranking: Ranking | None = None

    @model_validator(mode="after")
    def _testable(self) -> Claim:
        if bool(self.part) == bool(self.ranking):
            raise ValueError("give at least one [[part]], or a [ranking]")
        if missing := next((part.name for part in self.part if not (part.study or self.study)), None):
            raise ValueError(f"part {missing!r} has no study")
        return self

    @property
    def studies(self) -> list[str]:
        """The names of the studies that it looks at."""
        ranked = self.ranking.studies if self.ranking else []
        return list(dict.fromkeys([*(self.study_of(part) for part in self.part), *ranked]))

    def study_of(self, part: Part) -> str:
        """The name of the study of a part."""
        return part.study or self.study or ""

    def points(self, study: Sweep) -> list[Point]:
        """The runs of a study that the claim needs, in the order of its grid."""
        judged = self.judged(study)
        if self.ranking and study.name in self.ranking.studies:
            return judged
        wanted = [
            chosen for part in self.part if self.study_of(part) == study.name for chosen in (part.of, part.against)
        ]
        return [point for point in judged if any(w is not None and matches(point, w) for w in wanted)]

    def judged(self, study: Sweep) -> list[Point]:
        """The runs of a study that may count for the verdict: those of all seeds but the pilot's.

        Adding seeds until a hypothesis is decided would make errors more frequent than the interval promises. Seeds
        that nobody looked at when the number was decided keep the promise.
        """
        return [point for point in study.points if point.recipe.seed not in self.pilot]


def matches(point: Point, values: Values) -> bool:
    """Whether a run has these grid values."""
    return all(field in point.values and point.values[field] == value for field, value in values.items())


def shipped_claims() -> dict[str, Path]:
    """The claim files that come with fedflat, by name."""
    return {path.stem: path for path in sorted(shipped_folder("claims").glob("*.toml"))}


def load_claim(source: str | Path) -> Claim:
    """Loads a claim.

    Args:
        source: a claim file, or the name of one that comes with fedflat.

    Raises:
        RecipeError: the file is missing or invalid.
    """
    path = Path(source)
    if path.suffix != ".toml":
        known = shipped_claims()
        if str(source) not in known:
            raise RecipeError(f"{source}: there is no such claim; {nearest(str(source), known)}")
        path = known[str(source)]
    table = read_table(path)
    try:
        return Claim.model_validate({**table, "name": path.stem})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step + 1) if isinstance(step, int) else step for step in first["loc"]) or "the file"
        told = first["msg"].removeprefix("Value error, ")
        raise RecipeError(f"{path.name}: {shortened(where)}: {told[0].lower() + told[1:]}") from None


def load_studies(claim: Claim, beside: Path | None = None) -> dict[str, Sweep]:
    """Loads the studies of a claim, by name, and checks that each part means one run for each seed.

    Args:
        claim: the claim.
        beside: the directory of a claim file of your own, whose studies are in its directory `studies`.

    Raises:
        RecipeError: a study is missing or invalid, all of its seeds are the pilot's, its seeds have too few runs for a
            ranking, or a part does not fit its grid or compares a run with itself.
    """
    found = {name: load_sweep(_study_file(claim, name, beside)) for name in claim.studies}
    for study in found.values():
        _refuse_unnamed_weights(claim, study)
    ranked = claim.ranking.studies if claim.ranking else []
    for name in ranked:
        runs = Counter(point.recipe.seed for point in claim.judged(found[name]))
        if not runs:
            raise RecipeError(f"{claim.name}: no run of the study {name} is outside of the pilot")
        if max(runs.values()) < FEWEST:
            raise RecipeError(f"{claim.name}: no seed of the study {name} has {FEWEST} runs, which a ranking needs")
    for part in claim.part:
        study = found[claim.study_of(part)]
        groups = [chosen for chosen in (part.of, part.against) if chosen is not None]
        if not set.intersection(*(_seeds(claim, part, chosen, study) for chosen in groups)):
            raise RecipeError(
                f"{claim.name}: part {part.name!r}: `of` and `against` have no seed in common, so nothing can be paired"
            )
        if len(groups) == 2 and (part.against_quantity or part.quantity) == part.quantity:
            mine, theirs = ({digest(p) for p in claim.judged(study) if matches(p, chosen)} for chosen in groups)
            if mine & theirs:
                raise RecipeError(
                    f"{claim.name}: part {part.name!r}: `of` and `against` share runs, which show no effect"
                )
    return found


def _refuse_unnamed_weights(claim: Claim, study: Sweep) -> None:
    """Refuse a study whose results would be found again for other first weights at the same path."""
    if any(point.recipe.model.base and not point.recipe.model.base_sha256 for point in study.points):
        raise RecipeError(
            f"{claim.name}: the study {study.name} has a model.base without model.base_sha256; "
            "results are found again by their settings, and the path alone does not say which weights it holds"
        )


def _study_file(claim: Claim, name: str, beside: Path | None) -> Path:
    folder = (beside or shipped_folder("claims")) / "studies"
    known = {path.stem: path for path in folder.glob("*.toml")}
    if name not in known:
        short = shortened(name)
        raise RecipeError(f"{claim.name}: there is no study {short!r} in {folder}; {nearest(short, known)}")
    return known[name]


def _seeds(claim: Claim, part: Part, chosen: Values, study: Sweep) -> set[int]:
    """The seeds of the chosen runs. Raises `RecipeError` if there are none, or if a seed has several."""
    seeds = [point.recipe.seed for point in claim.judged(study) if matches(point, chosen)]
    if not seeds:
        beside = " outside of the pilot" if claim.pilot else ""
        raise RecipeError(f"{claim.name}: part {part.name!r}: no run of the study {study.name}{beside} has {chosen}")
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"{claim.name}: part {part.name!r}: {chosen} means several runs of one seed; say which")
    return set(seeds)
