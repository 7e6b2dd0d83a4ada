"""Privacy accounting: ε at δ after every round, computed with dp-accounting.

Without sampling, the noise of all rounds amounts to one Gaussian mechanism, whose ε is known exactly. Amplification by
sampling is accounted for with Rényi divergences (RDP) and, if every client is drawn independently, with the tighter
privacy loss distribution (PLD), which is not known for cohorts of fixed size. All are upper bounds; the smallest one is
reported. ε depends only on the recipe and the number of rounds, so a resumed run reports the same value.
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
from fedflat.rounds.cohort import expected_cohort
from fedflat.rounds.setup import Problem

ORDERS = (*range(2, 65), 80, 96, 128, 512, 1024)  # integers only: between them a sum may not converge
LARGE = 200.0  # an ε beyond which a tighter bound is not worth the memory of its distribution
POINTS = 4000  # approximate number of points of a privacy loss distribution from 0 to ε


@dataclass(frozen=True)
class Ledger:
    """The privacy loss of one round.

    `multiplier` is the noise in units of the largest change that one client can make to the sum. `sampled` holds the
    divergences of a round with a secret cohort, at the ORDERS; `odds` is the probability that a client is in it, if all
    are drawn independently. `missing` says why ε does not hold, if it does not. `hidden` names what clients do not send
    because it would bypass the noise. `discarded` is the number of rounds whose models clients have seen, although the
    run went back to an earlier checkpoint.
    """

    delta: float
    multiplier: float
    sampled: Any = None
    odds: float = 1.0
    missing: str = ""
    hidden: tuple[str, ...] = ()
    discarded: int = 0

    def reported(self, rounds: int) -> dict[str, Any]:
        """The privacy fields of a round's record."""
        hidden = dict.fromkeys(self.hidden)
        if self.missing:
            return {**hidden, "epsilon": None, "epsilon_missing": self.missing}
        return {**hidden, "epsilon": self.epsilon(rounds + self.discarded)}

    def epsilon(self, rounds: int) -> float | None:
        """ε at δ after that many rounds; None without noise."""
        if not self.multiplier:
            return None
        dp = _accounting()
        bounds = [dp.get_epsilon_gaussian(self.multiplier / math.sqrt(rounds), self.delta)]
        if self.sampled is not None:
            bounds.append(dp.rdp.compute_epsilon(ORDERS, rounds * self.sampled, self.delta)[0])
        if self.odds < 1 and min(bounds) <= LARGE:
            bounds.append(pld_epsilon(self.multiplier, self.odds, rounds, self.delta, min(bounds)))
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
    return replace(book, missing=_missing(problem), hidden=hidden, discarded=problem.discarded)


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
        odds = cohort / clients
        event = dp.PoissonSampledDpEvent(odds, dp.GaussianDpEvent(part.noise))
        return Ledger(part.delta, part.noise, _divergences(event, relation.ADD_OR_REMOVE_ONE), odds)
    event = dp.SampledWithoutReplacementDpEvent(clients, int(cohort), dp.GaussianDpEvent(part.noise / 2))
    return Ledger(part.delta, part.noise / 2, _divergences(event, relation.REPLACE_ONE))


def _divergences(event: Any, relation: Any) -> Any:
    return _accounting().rdp.RdpAccountant(ORDERS, relation).compose(event).rdp


def pld_epsilon(noise: float, odds: float, rounds: int, delta: float, about: float) -> float:
    """Return the ε at δ of a Gaussian mechanism over rounds in which each client takes part with probability `odds`.

    The privacy loss distribution is discretised with steps that suit an ε of `about` this size, and rounded upwards, so
    that a coarser step gives a larger ε and never one that is too small.
    """
    step = 2.0 ** math.floor(math.log2(max(about, 0.1) / POINTS))  # 2ⁿ: few distinct values to compute
    return float(_losses(noise, odds, step).self_compose(rounds).get_epsilon_for_delta(delta))


@cache
def _losses(noise: float, odds: float, step: float) -> Any:
    """The privacy loss distribution of one round."""
    _accounting()
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(noise, value_discretization_interval=step, sampling_prob=odds)


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
