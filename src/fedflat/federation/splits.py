"""Splits: divide the indices 0 … N−1 of a training set among m clients.

A split maps `(labels, clients, rng, *, options)` to one sorted int64 index array per client. Every split is a true
partition (disjoint and exhaustive), except the two that their papers draw with replacement: `pathological` and
`dirichlet(refill=True)`. The classes are the labels that occur; C is their number and n_c the samples of class c.
"""

import heapq
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import RecipeError, SplitError

Rng: TypeAlias = np.random.Generator
Indices: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Shards: TypeAlias = list[Indices]


def iid(labels: Indices, clients: int, rng: Rng, *, stratified: bool = False) -> Shards:
    """A random split into sizes that differ by at most one. With `stratified`, this also holds within every class.

    >>> [len(shard) for shard in iid(np.zeros(8, dtype=np.int64), 3, np.random.default_rng(0))]
    [3, 3, 2]
    """
    order = rng.permutation(len(labels))
    if stratified:
        order = order[np.argsort(labels[order], kind="stable")]
    return _gather(np.arange(len(labels)) % clients, order, clients)


def dirichlet(labels: Indices, clients: int, rng: Rng, *, alpha: float = 0.1, refill: bool = False) -> Shards:
    """Equal sizes; the classes of client i are drawn from its own prior q_i ~ Dir(α·1_C) (FedDyn, FedDC, FedSMOO, MAN).

    With `refill`, an exhausted class starts again from all its samples. The clients then follow their priors, and
    samples may be shared or left out (FedSMOO). Without it, the client draws again from q_i renormalised to the
    remaining classes (FedDyn, FedDC, MAN).

    Deviations: the N mod m leftover samples go one each to the first clients; the authors give all of them to client
    0. When a class is exhausted, the authors draw from q_i again. With refill this makes small classes rarer than in
    q_i, and without refill it may never end. Our code refills the class and takes it, or renormalises, and ends after
    N steps.

    Args:
        labels: the training labels.
        clients: number of clients m.
        rng: the generator for all draws.
        alpha: concentration α of the priors. A smaller one gives each client fewer classes.
        refill: whether an exhausted class starts again.
    """
    log_priors = _log_dirichlet(alpha, (clients, len(pools(labels))), rng)
    return _draw_in_turn(labels, clients, log_priors, rng, refill=refill)


def pathological(labels: Indices, clients: int, rng: Rng, *, classes: int) -> Shards:
    """Equal sizes; every client picks c classes and draws uniformly from them, with refill (FedSMOO).

    Clients pick independently, so some classes may have no client and some samples several.

    Args:
        labels: the training labels.
        clients: number of clients m.
        rng: the generator for all draws.
        classes: number c of classes of each client.
    """
    present = len(pools(labels))
    if not 1 <= classes <= present:
        raise RecipeError(f"pathological: classes must be from 1 to {present}, the classes in the data; got {classes}")
    chosen = rng.random((clients, present)).argsort(axis=1) < classes
    return _draw_in_turn(labels, clients, np.where(chosen, 0.0, -inf), rng, refill=True)


def shards(labels: Indices, clients: int, rng: Rng, *, shards: int) -> Shards:
    """Every class is cut into about s·m/C equal shards; every client gets s shards at random (FedSoL).

    If the classes have equal sizes, the clients have too. A client may get two shards of the same class.

    Deviation: if C does not divide s·m, some random classes are cut into one more shard. In the authors' code some
    clients get fewer shards instead.

    Args:
        labels: the training labels.
        clients: number of clients m.
        rng: the generator for all draws.
        shards: number s of shards of each client.
    """
    supply = _supply(labels)
    if shards * clients > len(labels):
        raise SplitError(
            f"shards: {clients} clients with {shards} shards each need more than {len(labels)} samples; "
            f"lower shards to at most {len(labels) // clients}"
        )
    per_class, extra = divmod(shards * clients, len(supply))
    if per_class == 0:
        raise SplitError(
            f"shards: {clients} clients with {shards} shards each cannot cover {len(supply)} classes; "
            f"raise shards to at least {-(-len(supply) // clients)}"
        )
    pieces = np.full(len(supply), per_class)
    pieces[rng.permutation(len(supply))[:extra]] += 1
    of_class = np.repeat(np.arange(len(supply)), pieces)
    rank = np.arange(len(of_class)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size = supply[of_class] // pieces[of_class] + (rank < supply[of_class] % pieces[of_class])
    table = np.zeros((clients, len(supply)), dtype=np.int64)
    np.add.at(table, (rng.permutation(len(of_class)) // shards, of_class), size)
    return _hand_out(labels, table, rng)


def lda(labels: Indices, clients: int, rng: Rng, *, alpha: float, min_size: int = 10) -> Shards:
    """Every class is divided among the clients by p ~ Dir(α·1_m), so sizes differ (FedSoL, NIID-Bench).

    Clients that already hold N/m samples get no more. The draw is repeated until every client holds `min_size` samples.

    Deviation: the authors' code may repeat forever. We stop after 200 draws (fewer if they would take more than five
    million variates) and move samples from the largest clients to those below `min_size`.

    Args:
        labels: the training labels.
        clients: number of clients m.
        rng: the generator for all draws.
        alpha: concentration α. A smaller one gives more uneven parts.
        min_size: smallest number of samples of a client.
    """
    require_min_size(labels, clients, min_size)
    supply = _supply(labels)
    table = _lda_table(supply, clients, alpha, rng)
    for _ in range(min(200, 5_000_000 // table.size)):
        if table.sum(axis=1).min() >= min_size:
            break
        table = _lda_table(supply, clients, alpha, rng)
    _lift(table, min_size)
    return _hand_out(labels, table, rng)


def natural(labels: Indices, clients: int, rng: Rng, *, groups: NDArray[Any] | None) -> Shards:
    """One client per group (a writer, a hospital), in the order of the group ids; `clients=0` means one for each group.

    With fewer clients, each group goes as a whole to the client with the fewest samples so far, largest group first
    and ties at random. The sizes of two clients then differ by at most the largest group.

    Args:
        labels: the training labels.
        clients: number of clients m, at most the number of groups.
        rng: the generator for all draws.
        groups: the group id of each sample.
    """
    if groups is None or len(groups) == 0:
        raise SplitError("natural: this dataset has no groups; choose a dataset with writers or another split")
    if len(groups) != len(labels):
        raise SplitError(f"natural: {len(groups)} group ids for {len(labels)} samples; give one per sample")
    names, member = np.unique(groups, return_inverse=True)
    clients = clients or len(names)
    if len(names) < clients:
        raise SplitError(
            f"natural: {clients} clients but only {len(names)} groups; lower clients to {len(names)}, or set it "
            "to 0 for one client per group"
        )
    owner = np.arange(clients) if clients == len(names) else _pack(np.bincount(member), clients, rng)
    return _gather(owner[member], np.arange(len(labels)), clients)


def sizes(
    labels: Indices, clients: int, rng: Rng, *, sizes: Sequence[float] | None = None, exponent: float | None = None
) -> Shards:
    """IID labels, unequal sizes: relative `sizes`, or the power law size_i ∝ i^−exponent for i = 1 … m.

    Sizes are rounded by largest remainder. A client that would get none receives one sample from the largest.

    >>> [len(shard) for shard in sizes(np.zeros(8, dtype=np.int64), 3, np.random.default_rng(0), sizes=[1, 1, 2])]
    [2, 2, 4]
    """
    require("sizes", len(labels), clients)
    if (sizes is None) == (exponent is None):
        raise RecipeError("sizes: give either the option sizes or the option exponent")
    weights = np.arange(1.0, clients + 1) ** -exponent if exponent is not None else np.asarray(sizes, dtype=np.float64)
    if len(weights) != clients:
        raise RecipeError(f"sizes: {len(weights)} sizes for {clients} clients; give one per client")
    exact = weights / weights.max()
    exact *= len(labels) / exact.sum()
    amount = np.floor(exact).astype(np.int64)
    amount[np.argsort(amount - exact, kind="stable")[: len(labels) - amount.sum()]] += 1
    _lift(amount[:, None], 1)
    return _gather(np.repeat(np.arange(clients), amount), rng.permutation(len(labels)), clients)


def require(kind: str, samples: int, clients: int) -> None:
    """Raises `SplitError` if there are fewer samples than clients."""
    if samples == 0:
        raise SplitError(f"{kind}: there are no samples to divide")
    if samples < clients:
        raise SplitError(f"{kind}: {clients} clients but only {samples} samples; lower clients to at most {samples}")


def require_min_size(labels: Indices, clients: int, min_size: int) -> None:
    """Raises `SplitError` if there are too few samples to give every client `min_size` of them."""
    if len(labels) < clients * min_size:
        raise SplitError(
            f"lda: {clients} clients with min_size {min_size} need {clients * min_size} samples but there are only "
            f"{len(labels)}; lower min_size to at most {len(labels) // clients}"
        )


def pools(labels: Indices) -> Shards:
    """The indices of each class that occurs, in the order of the labels."""
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(_supply(labels))[:-1])


def _supply(labels: Indices) -> Indices:
    return np.unique(labels, return_counts=True)[1]


def _gather(owner: Indices, index: Indices, clients: int) -> Shards:
    """Gives sample `index[t]` to client `owner[t]`, for all t."""
    order = np.lexsort((index, owner))
    return np.split(index[order], np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _hand_out(labels: Indices, table: Indices, rng: Rng) -> Shards:
    """Draws random samples such that client i holds `table[i, c]` of class c; the columns sum to n_c."""
    clients, classes = table.shape
    owner = np.repeat(np.tile(np.arange(clients), classes), table.T.ravel())
    return _gather(owner, np.concatenate([rng.permutation(pool) for pool in pools(labels)]), clients)


def _log_dirichlet(alpha: float, shape: tuple[int, ...], rng: Rng) -> Floats:
    """The logarithm of unnormalised Dir(α) draws along the last axis.

    For small α a Gamma(α) variate underflows to 0. Written as G·U^(1/α) with G ~ Gamma(α+1) and U uniform, its
    logarithm is safe.
    """
    return np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha


def _cumulative(logits: Floats, allowed: NDArray[np.bool_] | bool = True) -> Floats:
    """The cumulative distribution of softmax(logits) over `allowed` entries; never NaN, and it ends at exactly 1."""
    masked = np.where(allowed, logits, -inf)
    total: Floats = np.exp(masked - masked.max(axis=-1, keepdims=True)).cumsum(axis=-1)
    return total / total[..., -1:]


def _draw_in_turn(labels: Indices, clients: int, log_priors: Floats, rng: Rng, *, refill: bool) -> Shards:
    """Repeats N times: a random client that is not full draws a class from its prior and takes its next sample."""
    samples = len(labels)
    stock = [rng.permutation(pool) for pool in pools(labels)]
    left = _supply(labels)
    room = samples // clients + (np.arange(clients) < samples % clients)
    waiting = np.flatnonzero(room).tolist()
    chance = _cumulative(log_priors)
    owner, index = np.empty((2, samples), dtype=np.int64)
    for turn, (seat, level) in enumerate(rng.random((samples, 2)).tolist()):
        place = int(seat * len(waiting))
        client = waiting[place]
        drawn = chance[client].searchsorted(level, side="right")
        if left[drawn] == 0 and refill:
            left[drawn] = len(stock[drawn])
        elif left[drawn] == 0:
            chance[client] = _cumulative(log_priors[client], left > 0)
            drawn = chance[client].searchsorted(rng.random(), side="right")
        left[drawn] -= 1
        owner[turn], index[turn] = client, stock[drawn][left[drawn]]
        room[client] -= 1
        if room[client] == 0:
            waiting[place] = waiting[-1]
            waiting.pop()
    return _gather(owner, index, clients)


def _lda_table(supply: Indices, clients: int, alpha: float, rng: Rng) -> Indices:
    table = np.zeros((clients, len(supply)), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for c, logits in enumerate(_log_dirichlet(alpha, (len(supply), clients), rng)):
        below_mean = held * clients < supply.sum()
        table[:, c] = np.diff(np.floor(_cumulative(logits, below_mean) * supply[c]), prepend=0)
        held += table[:, c]
    return table


def _lift(table: Indices, least: int) -> None:
    """Moves samples in place from the largest class of the largest client to clients with fewer than `least`.

    Each move fills the receiver, reduces the giver to `least` or empties one of its classes, so there are at most
    m(C + 2) moves.
    """
    held = table.sum(axis=1)
    for needy in np.flatnonzero(held < least):
        while held[needy] < least:
            giver = held.argmax()
            c = table[giver].argmax()
            moved = min(least - held[needy], held[giver] - least, table[giver, c])
            table[giver, c] -= moved
            table[needy, c] += moved
            held[giver] -= moved
            held[needy] += moved


def _pack(weights: Indices, bins: int, rng: Rng) -> Indices:
    """Assigns each weight to a bin: heaviest first, ties at random, into the bin that is lightest so far."""
    shuffled = rng.permutation(len(weights))
    heap = [(0, i) for i in range(bins)]
    owner = np.empty(len(weights), dtype=np.int64)
    for item in shuffled[np.argsort(-weights[shuffled], kind="stable")]:
        load, owner[item] = heap[0]
        heapq.heapreplace(heap, (load + int(weights[item]), heap[0][1]))
    return owner


SPLITS: dict[str, Callable[..., Shards]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "lda": lda,
    "pathological": pathological,
    "shards": shards,
    "natural": natural,
    "sizes": sizes,
}
