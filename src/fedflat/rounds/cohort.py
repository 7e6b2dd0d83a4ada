"""Sampling of cohorts: fedflat's own draws, or those of the authors' code."""

from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.random import RandomState

from fedflat.errors import RecipeError
from fedflat.federation import Floats
from fedflat.randomness import Secret, numpy_generator
from fedflat.recipe import Recipe, Server


def cohort_size(server: Server, clients: int) -> int:
    """Return the number of clients in a round: a count as given, a ratio as ⌊ratio · m⌋ but at least one.

    With FedSoL's draws, the floor is taken of the floating-point product, as in its code: 0.29 · 100 is 28.

    Raises:
        RecipeError: if the cohort is larger than the number of clients.

    >>> cohort_size(Server(cohort=0.1), 100), cohort_size(Server(cohort=3), 100)
    (10, 3)
    """
    slack = 0.0 if server.draws == "fedsol" else 1e-9
    size = server.cohort if isinstance(server.cohort, int) else max(int(clients * server.cohort + slack), 1)
    if size > clients:
        raise RecipeError(f"server.cohort = {size}: there are only {clients} clients; lower it or raise split.clients")
    return size


def expected_cohort(server: Server, clients: int) -> float:
    """Return the mean number of clients in a round; not necessarily an integer if each is drawn independently."""
    whole = server.sampling == "uniform" or isinstance(server.cohort, int)
    return cohort_size(server, clients) if whole else server.cohort * clients


def cohort_seed(recipe: Recipe, seed: int = 0) -> int:
    """Return the seed of the cohorts: the recipe's or, with FL-Simulator's draws, the split's if it is set.

    A secret of the server takes precedence over both.
    """
    if isinstance(seed, Secret):
        return seed
    shared = recipe.split.seed if recipe.server.draws == "fl-simulator" else None
    return recipe.seed if shared is None else shared


def draw_cohort(server: Server, clients: int, seed: int, round: int, empty: bool = False) -> list[int]:
    """Draw the clients of a round: a fixed number without replacement, or each client with a given probability.

    `server.draws` names the generator: fedflat's own, made from (seed, round), or NumPy's legacy generator, seeded with
    the round t as the authors do (FedSoL and fedMAN do not use the seed):

    * `fedsol`: seed t, then `choice(m, n, replace=False)`;
    * `fl-simulator`: seed t + seed + r, then m uniform numbers, where r counts the cohorts that came out empty;
    * `fedman`: the same with t + r.

    Args:
        server: the recipe's section, with the size of the cohort and the kind of sampling.
        clients: the number m of all clients.
        seed: the seed of the cohorts.
        round: the round t.
        empty: whether the cohort may be empty; otherwise at least one client is drawn.
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
    """Yield one uniform number per client for each attempt."""
    if draws == "fedflat":
        chance = numpy_generator(seed, "cohort", round)
        while True:
            yield chance.random(clients)
    for t in count(round + seed if draws == "fl-simulator" else round):
        yield RandomState(t % 2**32).uniform(size=clients)
