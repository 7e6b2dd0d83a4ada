"""What a run's noise buys: ε at δ after every round, computed by dp-accounting.

Without sampling, the noise of all rounds is that of one Gaussian mechanism, whose ε is known exactly. What sampling
saves is accounted for by Rényi divergences (RDP): that accountant knows both ways to draw a cohort, which the PLD
accountant does not, and errs on the safe side. An ε follows from the recipe and the number of rounds alone, so a
resumed run reports the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from fedflat.errors import RecipeError
from fedflat.method import Method
from fedflat.parts import CentralPrivacy, Privacy
from fedflat.recipe import Admission, Recipe
from fedflat.server import expected_cohort

ORDERS = (*range(2, 65), 80, 96, 128, 512, 1024)  # whole ones: between them a sum may not converge


@dataclass(frozen=True)
class Ledger:
    """What one round gives away.

    `multiplier` is the noise in units of the most that one client can change the sum by; `sampled` are the divergences
    of a round of a secret cohort, at the ORDERS.
    """

    delta: float
    multiplier: float
    sampled: Any = None

    def epsilon(self, rounds: int) -> float | None:
        """ε at δ after that many rounds; None without noise, as then there is none."""
        if not self.multiplier:
            return None
        dp = _accounting()
        bounds = [dp.get_epsilon_gaussian(self.multiplier / math.sqrt(rounds), self.delta)]
        if self.sampled is not None:
            bounds.append(dp.rdp.compute_epsilon(ORDERS, rounds * self.sampled, self.delta)[0])
        return float(min(bounds))


def ledger(method: Method, recipe: Recipe, clients: int) -> Ledger | None:
    """The ledger of a run; None if nothing in its method is private."""
    part = method.protection
    if not isinstance(part, Privacy):
        return None
    if not isinstance(part, CentralPrivacy):
        return _checked(Ledger(part.delta, part.noise / 2))
    _refuse_comparisons(recipe.admission)
    return _checked(_central(part, recipe.server.sampling, expected_cohort(recipe.server, clients), clients))


def _checked(book: Ledger) -> Ledger:
    """A ledger that can tell its ε."""
    book.epsilon(1)
    return book


@cache
def _central(part: Privacy, sampling: str, cohort: float, clients: int) -> Ledger:
    """The ledger of noise on the sum over a cohort that nobody outside knows.

    Where every client is drawn for itself, one client more or less changes the sum by C. A cohort of fixed size has one
    client in place of another, which changes it by up to 2 C.
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
    """What one client sends must not decide whether others count."""
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
