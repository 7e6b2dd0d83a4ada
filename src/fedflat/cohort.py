"""Who takes part in a round: by our own draws, or by those of the authors' code."""

from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.random import RandomState

from fedflat.errors import RecipeError
from fedflat.federation.splits import Floats
from fedflat.randomness import numpy_generator
from fedflat.recipe import Recipe, Server


def cohort_size(server: Server, clients: int) -> int:
    """The number of clients of a round: a count as it is, a ratio as ⌊ratio · m⌋ but at least one.

    FedSoL's code takes the floor of the product as floating-point numbers have it: 0.29 · 100 is 28.

    >>> cohort_size(Server(cohort=0.1), 100), cohort_size(Server(cohort=3), 100)
    (10, 3)
    """
    slack = 0.0 if server.draws == "fedsol" else 1e-9
    size = server.cohort if isinstance(server.cohort, int) else max(int(clients * server.cohort + slack), 1)
    if size > clients:
        raise RecipeError(f"server.cohort = {size}: there are only {clients} clients; lower it or raise split.clients")
    return size


def expected_cohort(server: Server, clients: int) -> float:
    """The mean number of clients of a round, which need not be whole where each is drawn for itself."""
    whole = server.sampling == "uniform" or isinstance(server.cohort, int)
    return cohort_size(server, clients) if whole else server.cohort * clients


def cohort_seed(recipe: Recipe) -> int:
    """The seed of the cohorts: the recipe's, but FL-Simulator has one seed for its partition and its participants."""
    shared = recipe.split.seed if recipe.server.draws == "fl-simulator" else None
    return recipe.seed if shared is None else shared


def draw_cohort(server: Server, clients: int, seed: int, round: int, empty: bool = False) -> list[int]:
    """Who takes part: exactly the cohort without replacement, or each client with that probability.

    At least one, unless the cohort may be empty. `server.draws` names the generator: ours, made of (seed, round), or
    NumPy's legacy one, seeded with the round t as the authors do (the seed plays no part for FedSoL and fedMAN):

    * `fedsol`: seed t, then `choice(m, n, replace=False)`;
    * `fl-simulator`: seed t + seed + r, then m uniform numbers, where r counts the cohorts that came out empty;
    * `fedman`: the same with t + r.
    """
    size = cohort_size(server, clients)
    if server.sampling == "uniform":
        chance = RandomState(round) if server.draws == "fedsol" else numpy_generator(seed, "cohort", round)
        return sorted(chance.choice(clients, size, replace=False).tolist())
    odds = server.cohort if isinstance(server.cohort, float) else size / clients
    for levels in _levels(server.draws, clients, seed, round):
        active = np.flatnonzero(levels <= odds).tolist()
        if active or empty:
            return active
    raise AssertionError("the levels have no end")


def _levels(draws: str, clients: int, seed: int, round: int) -> Iterator[Floats]:
    """Try after try, a uniform number for each client."""
    if draws == "fedflat":
        chance = numpy_generator(seed, "cohort", round)
        while True:
            yield chance.random(clients)
    for t in count(round + seed if draws == "fl-simulator" else round):
        yield RandomState(t % 2**32).uniform(size=clients)
