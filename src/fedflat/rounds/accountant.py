"""Privacy accounting: ε at δ after every round, computed with dp-accounting.

Without sampling, the noise of all rounds amounts to one Gaussian mechanism, whose ε is known exactly. Amplification by
sampling is accounted for with Rényi divergences (RDP): unlike the PLD accountant, the RDP accountant supports both ways
to draw a cohort, and its bound is conservative. ε depends only on the recipe and the number of rounds, so a resumed run
reports the same value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

from fedflat.errors import RecipeError
from fedflat.methods import CentralPrivacy, Method, Privacy
from fedflat.recipe import Admission, Recipe
from fedflat.rounds.client import Problem
from fedflat.rounds.cohort import expected_cohort

ORDERS = (*range(2, 65), 80, 96, 128, 512, 1024)  # integers only: between them a sum may not converge


@dataclass(frozen=True)
class Ledger:
    """The privacy loss of one round.

    `multiplier` is the noise in units of the largest change that one client can make to the sum. `sampled` holds the
    divergences of a round with a secret cohort, at the ORDERS. `missing` says why ε does not hold, if it does not.
    `hidden` names what clients do not send because it would bypass the noise.
    """

    delta: float
    multiplier: float
    sampled: Any = None
    missing: str = ""
    hidden: tuple[str, ...] = ()

    def reported(self, rounds: int) -> dict[str, Any]:
        """The privacy fields of a round's record."""
        hidden = dict.fromkeys(self.hidden)
        if self.missing:
            return {**hidden, "epsilon": None, "epsilon_missing": self.missing}
        return {**hidden, "epsilon": self.epsilon(rounds)}

    def epsilon(self, rounds: int) -> float | None:
        """ε at δ after that many rounds; None without noise."""
        if not self.multiplier:
            return None
        dp = _accounting()
        bounds = [dp.get_epsilon_gaussian(self.multiplier / math.sqrt(rounds), self.delta)]
        if self.sampled is not None:
            bounds.append(dp.rdp.compute_epsilon(ORDERS, rounds * self.sampled, self.delta)[0])
        return float(min(bounds))


def ledger_of(problem: Problem) -> Ledger | None:
    """Return the ledger of a run. A simulation's ledger has the ε that a deployment of the recipe would have.

    In a deployment, ε holds only if others cannot compute the secrets it relies on.

    Returns:
        The ledger, or None if nothing in the method is private.
    """
    book = ledger(problem.method, problem.recipe, problem.federation.clients)
    if book is None or not problem.deployed:
        return book
    hidden = ("local_loss",) if problem.method.protection and problem.method.protection.protects == "upload" else ()
    return replace(book, missing=_missing(problem), hidden=hidden)


def _missing(problem: Problem) -> str:
    """Why the ε of a deployment does not hold. Seeded noise has already been refused."""
    if problem.method.always_moves and problem.secret is None:
        return "the cohorts follow from the recipe's seed, which every client knows"
    return ""


def ledger(method: Method, recipe: Recipe, clients: int) -> Ledger | None:
    """Return the ledger of a run, or None if nothing in its method is private."""
    part = method.protection
    if not isinstance(part, Privacy):
        return None
    if not isinstance(part, CentralPrivacy):
        return _checked(Ledger(part.delta, part.noise / 2))
    _refuse_comparisons(recipe.admission)
    return _checked(_central(part, recipe.server.sampling, expected_cohort(recipe.server, clients), clients))


def _checked(book: Ledger) -> Ledger:
    """Check that the ledger can compute its ε."""
    book.epsilon(1)
    return book


@cache
def _central(part: Privacy, sampling: str, cohort: float, clients: int) -> Ledger:
    """The ledger of noise on the sum over a cohort that is secret to outsiders.

    If every client is drawn independently, adding or removing one client changes the sum by C. In a cohort of fixed
    size one client replaces another, which changes the sum by up to 2 C.
    """
    if not part.noise:
        return Ledger(part.delta, 0.0)
    dp, relation = _accounting(), _accounting().NeighboringRelation
    if sampling == "bernoulli":
        event = dp.PoissonSampledDpEvent(cohort / clients, dp.GaussianDpEvent(part.noise))
        return Ledger(part.delta, part.noise, _divergences(event, relation.ADD_OR_REMOVE_ONE))
    event = dp.SampledWithoutReplacementDpEvent(clients, int(cohort), dp.GaussianDpEvent(part.noise / 2))
    return Ledger(part.delta, part.noise / 2, _divergences(event, relation.REPLACE_ONE))


def _divergences(event: Any, relation: Any) -> Any:
    return _accounting().rdp.RdpAccountant(ORDERS, relation).compose(event).rdp


def _refuse_comparisons(limits: Admission) -> None:
    """Refuse checks in which one client's upload decides whether others count."""
    for field, value, neutral in ("max_ratio", limits.max_ratio, 0), ("quorum", limits.quorum, 1):
        if value != neutral:
            raise RecipeError(
                f"admission.{field} = {value:g}: one client could decide whether others count, which the noise of "
                f"central_dp does not hide; set it to {neutral}"
            )


def _accounting() -> ModuleType:
    try:
        import dp_accounting
    except ImportError:
        raise RecipeError("method: ε needs dp-accounting; pip install 'fedflat[privacy]', or set noise to 0") from None
    module: ModuleType = dp_accounting
    return module
