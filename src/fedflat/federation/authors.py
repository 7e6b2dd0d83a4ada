"""The authors' own draws: exact reproductions of the partitions of three public repositories.

| draws          | repository                   | splits                                              |
|----------------|------------------------------|-----------------------------------------------------|
| `fedsol`       | Lee-Gihun/FedSOL             | iid, lda, shards; and label-matched test sets       |
| `fl-simulator` | woodenchild95/FL-Simulator   | iid, dirichlet (with refill), pathological          |
| `fedman`       | vcl-iisc/fedMAN              | iid, dirichlet (without refill)                     |

They use NumPy's legacy generator, whose stream NumPy has frozen. So the order of the calls below matters: they draw,
discard and repeat exactly where the authors' code does. A split maps `(labels, clients, rng, *, options)` to one index
array per client. Samples that do not divide evenly are left out or go to client 0, as in the authors' code.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray

from fedflat.errors import RecipeError, SplitError
from fedflat.federation.partition import check_options, require_samples
from fedflat.federation.splits import SPLITS, Floats, Indices, Shards, pools, require, require_min_size

Split: TypeAlias = Callable[..., Shards]
MATCHED = 1000  # size of FedSoL's local test sets
LDA_DRAWS = 100_000  # takes minutes; for 100 clients at α = 0.05, CIFAR-10 needs 3,482 draws and MNIST 17,293
CLASS_DRAWS = 2**27  # takes a few seconds


def divide(
    draws: str, kind: str, labels: Indices, clients: int, seed: int, *, test: Indices | None = None, **options: Any
) -> tuple[Shards, Shards | None]:
    """Reproduces the partition of the authors' code, and FedSoL's local test sets.

    Args:
        draws: `fedsol`, `fl-simulator` or `fedman`.
        kind: the split, one of those in the authors' code.
        labels: the training labels, in the order of the data set's files.
        clients: number of clients m.
        seed: the seed of the partition: 19940817 in FedSoL's code, 20 in FL-Simulator's, 23217 in fedMAN's.
        test: the test labels, for FedSoL's local test sets.
        options: the options of the split.

    Returns:
        The sorted training samples of each client, and the test samples of each client (FedSoL) or None.

    Raises:
        RecipeError: the authors' code does not have the split, or an option or the seed is invalid.
        SplitError: the split cannot be made.

    >>> divide("fedsol", "iid", np.zeros(7, dtype=np.int64), 2, seed=0)[0]
    [array([1, 2, 6]), array([3, 4, 5])]
    """
    split = _split(draws, kind)
    check_options(kind, split, options)
    require(kind, len(labels), clients)
    if not 0 <= seed < 2**32:
        raise RecipeError(f"split.seed = {seed}: split.draws = {draws!r} needs a seed below 2**32")
    rng = RandomState(seed)
    order = _loaded(draws, labels, seed)
    shards = [order[shard] for shard in split(labels[order], clients, rng, **options)]
    require_samples(kind, shards)
    tests = _matched_tests(labels, shards, test, rng) if draws == "fedsol" and test is not None else None
    return [*map(np.sort, shards)], tests


def splits_by(draws: str) -> dict[str, Split]:
    """The splits with these draws, by name. `draws` is `fedflat` (our own) or one of the authors' repositories."""
    return SPLITS if draws == "fedflat" else DRAWS[draws]


def _split(draws: str, kind: str) -> Split:
    if kind in DRAWS[draws]:
        return DRAWS[draws][kind]
    *others, last = DRAWS[draws]
    raise RecipeError(
        f"split.draws = {draws!r}: those authors have no split {kind!r}, only {', '.join(others)} and {last}; "
        "choose one of them, or split.draws = 'fedflat'"
    )


def _loaded(draws: str, labels: Indices, seed: int) -> Indices:
    """The order in which the authors' code reads the data set: that of the files, except for fedMAN's Tiny-ImageNet.

    That one comes from a shuffling torch loader, with torch's generator at the same seed. Two loaders are opened before
    the first batch, and each draws a number. The third number seeds the permutation.
    """
    if draws == "fedman" and _balanced(labels, classes=200, each=500):
        chance = torch.Generator().manual_seed(seed)
        for _ in range(3):
            number = int(torch.empty((), dtype=torch.int64).random_(generator=chance))
        return torch.randperm(len(labels), generator=torch.Generator().manual_seed(number)).numpy()
    return np.arange(len(labels))


def _balanced(labels: Indices, classes: int, each: int) -> bool:
    supply = np.unique(labels, return_counts=True)[1]
    return len(supply) == classes and bool(np.all(supply == each))


def fedsol_iid(labels: Indices, clients: int, rng: RandomState) -> Shards:
    """⌊N/m⌋ samples each. The rest is shuffled again before every client, and the last N mod m are left out."""
    size = len(labels) // clients
    left = np.arange(len(labels))
    shards = []
    for _ in range(clients):
        rng.shuffle(left)
        shards.append(left[:size])
        left = left[size:]
    return shards


def fedsol_lda(labels: Indices, clients: int, rng: RandomState, *, alpha: float, min_size: int = 10) -> Shards:
    """Each class is cut at ⌊n_c · cumsum(p)⌋ with p ~ Dir(α·1_m); p is 0 for clients with ⌊N/m⌋ samples or more.

    Everything is drawn again until every client has `min_size` samples (10 in the authors' code). The classes stay
    shuffled between draws. The authors' loop is unbounded; ours raises an error.
    """
    require_min_size(labels, clients, min_size)
    classes = pools(labels)
    for _ in range(LDA_DRAWS):
        held = np.zeros(clients, dtype=np.int64)
        cuts = []
        for pool in classes:
            rng.shuffle(pool)
            cuts.append(_lda_cuts(len(pool), alpha, held < len(labels) // clients, rng))
            held += np.diff(cuts[-1], prepend=0, append=len(pool))
        for size in held:  # the authors shuffle each client's samples; we sort them, and only advance the stream
            rng.shuffle(np.empty(size, dtype=np.int64))
        if held.min() >= min_size:
            pieces = [np.split(pool, ends) for pool, ends in zip(classes, cuts, strict=True)]
            return [np.concatenate(client) for client in zip(*pieces, strict=True)]
    raise SplitError(
        f"lda: FedSoL's draws gave some client fewer than {min_size} samples {LDA_DRAWS:,} times in a row; "
        "raise alpha, lower clients, or set split.draws = 'fedflat'"
    )


def _lda_cuts(samples: int, alpha: float, below: NDArray[np.bool_], rng: RandomState) -> Indices:
    """The positions at which a class is cut. Clients that are not `below` the mean size get nothing."""
    with np.errstate(invalid="ignore"):
        share = rng.dirichlet(np.repeat(alpha, len(below))) * below
        share /= share.sum()
    # If no client has a share, this is 0/0. In the authors' code the last client then gets the whole class.
    return np.nan_to_num(np.cumsum(share) * samples).astype(np.int64)[:-1]


def fedsol_shards(labels: Indices, clients: int, rng: RandomState, *, shards: int) -> Shards:
    """Every class is cut into ⌊s·m/C⌋ contiguous shards; clients take random shards of the classes in a shuffled list.

    If m does not divide the length of the list, the last clients get fewer shards. (The authors extend the list with
    some of its own entries, but no shards are left by then.) A client without shards gets the samples of the client
    before it.
    """
    classes = pools(labels)
    per_class = int(shards * clients / len(classes))
    if per_class == 0:
        raise SplitError(
            f"shards: {clients} clients with {shards} shards each cannot cover {len(classes)} classes; "
            f"raise shards to at least {-(-len(classes) // clients)}"
        )
    stock = [_equal_shards(pool, per_class) for pool in classes]
    wanted = np.repeat(np.arange(len(classes)), per_class)
    rng.shuffle(wanted)
    width = -(-len(wanted) // clients)
    division: Shards = []
    for i in range(clients):
        row = wanted[i * width : (i + 1) * width]
        taken = [stock[c].pop(rng.choice(len(stock[c]), replace=False)) for c in row]
        if not taken and not division:
            raise SplitError("shards: FedSoL's draws leave client 0 without a shard; change the seed or shards")
        division.append(np.concatenate(taken) if taken else division[-1])
    return division


def _equal_shards(pool: Indices, pieces: int) -> list[Indices]:
    """Cuts a class into contiguous shards. Leftover samples from its end go one each to the first shards."""
    size = len(pool) // pieces
    leftover = pool[size * pieces :]
    return [np.append(pool[i * size : (i + 1) * size], leftover[i : i + 1]) for i in range(pieces)]


def _matched_tests(labels: Indices, shards: Shards, test: Indices, rng: RandomState) -> Shards:
    """FedSoL's local test sets: ⌊1000 · q_c⌋ random test samples of each class c, or all if there are fewer.

    q is the client's label distribution. It and the product are in single precision, so the result of the floor may be
    one too low. The draw continues the stream of the partition.
    """
    candidates = [np.flatnonzero(test == c) for c in np.unique(labels)]
    tests = []
    for shard in shards:
        held = np.array([np.count_nonzero(labels[shard] == c) for c in np.unique(labels)], dtype=np.float32)
        amounts = (held / np.float32(len(shard)) * np.float32(MATCHED)).astype(np.int64)
        chosen = [
            rng.choice(pool, min(len(pool), amount), replace=False)
            for pool, amount in zip(candidates, amounts, strict=True)
            if len(pool)
        ]
        tests.append(np.sort(np.concatenate(chosen)))
    return tests


def simulator_iid(labels: Indices, clients: int, rng: RandomState, *, stratified: bool | None = None) -> Shards:
    """The shuffled training set in consecutive parts; client 0 gets N mod m more. CIFAR-100 is split by class."""
    order = rng.permutation(len(labels))
    if _by_class(labels, stratified):
        return [order[shard] for shard in _stratified(labels[order], clients)]
    return np.split(order, np.cumsum(_rest_to_first(len(labels), clients))[:-1])


def simulator_dirichlet(
    labels: Indices, clients: int, rng: RandomState, *, alpha: float, refill: bool = True
) -> Shards:
    """Equal sizes, classes from q_i ~ Dir(α·1_C). An exhausted class is refilled, and the class is drawn again."""
    if not refill:
        raise RecipeError("split.draws = 'fl-simulator': its dirichlet has refill = true; choose draws = 'fedman'")
    order = rng.permutation(len(labels))
    priors = rng.dirichlet([alpha] * len(np.unique(labels)), size=clients).cumsum(axis=1)
    room = _rest_to_first(len(labels), clients)
    return [order[shard] for shard in _in_turn(labels[order], room, priors, rng, refill=True)]


def simulator_pathological(labels: Indices, clients: int, rng: RandomState, *, classes: int) -> Shards:
    """Like dirichlet with refill, but q_i is uniform over c classes: a shuffled row of c ones and C − c zeros."""
    present = len(np.unique(labels))
    if not 1 <= classes <= present:
        raise RecipeError(f"pathological: classes must be from 1 to {present}, the classes in the data; got {classes}")
    order = rng.permutation(len(labels))
    chosen = np.tile((np.arange(present) < classes).astype(np.float64), (clients, 1))
    for row in chosen:
        rng.shuffle(row)
    room = _rest_to_first(len(labels), clients)
    priors = chosen.cumsum(axis=1) / classes
    return [order[shard] for shard in _in_turn(labels[order], room, priors, rng, refill=True)]


def man_iid(labels: Indices, clients: int, rng: RandomState, *, stratified: bool | None = None) -> Shards:
    """The training set, cut into consecutive parts without shuffling; the last N mod m samples are left out.

    CIFAR-100 is split by class.
    """
    if _by_class(labels, stratified):
        return _stratified(labels, clients)
    size = len(labels) // clients
    return [*np.arange(size * clients).reshape(clients, size)]


def man_dirichlet(labels: Indices, clients: int, rng: RandomState, *, alpha: float, refill: bool = False) -> Shards:
    """⌊N/m⌋ samples each, classes from q_i ~ Dir(α·1_C), drawn again while the class is exhausted."""
    if refill:
        raise RecipeError("split.draws = 'fedman': its dirichlet has refill = false; choose draws = 'fl-simulator'")
    priors = rng.dirichlet([alpha] * len(np.unique(labels)), size=clients).cumsum(axis=1)
    room = np.full(clients, len(labels) // clients)
    return _in_turn(labels, room, priors, rng, refill=False)


def _rest_to_first(samples: int, clients: int) -> Indices:
    room = np.full(clients, samples // clients)
    room[0] += samples % clients
    return room


def _by_class(labels: Indices, stratified: bool | None) -> bool:
    """The recipe's setting or, by default, that of the authors, who split only CIFAR-100 by class."""
    return _balanced(labels, classes=100, each=500) if stratified is None else stratified


def _stratified(labels: Indices, clients: int) -> Shards:
    """Client i takes the i-th run of each class. Its order comes from NumPy's sort, which is unstable."""
    classes = len(np.unique(labels))
    each, rest = divmod(len(labels), classes)
    if rest or each % clients or not _balanced(labels, classes, each):
        raise SplitError(
            f"iid: the authors' split by class needs classes of equal size, divisible by {clients} clients; "
            "change clients, or set split.draws = 'fedflat'"
        )
    # The authors use the default sort, so we must too. Its order of equal elements depends on NumPy's version and CPU.
    runs = np.argsort(labels).reshape(classes, clients, -1)
    return [runs[:, i].ravel() for i in range(clients)]


def _in_turn(labels: Indices, room: Indices, priors: Floats, rng: RandomState, *, refill: bool) -> Shards:
    """Until all clients are full: draws a client and its class, and gives it the last untaken sample of that class.

    Drawing a full client or an exhausted class uses up a draw. `priors` are cumulative. A level above the last entry,
    which may be below 1 after rounding, means class 0 (the argmax of all False).
    """
    classes = pools(labels)
    left = [len(pool) for pool in classes]
    free = room.tolist()
    levels = priors.tolist()
    shards: list[list[int]] = [[] for _ in free]
    for _ in range(sum(free)):
        client = rng.randint(len(free))
        while not free[client]:
            client = rng.randint(len(free))
        free[client] -= 1
        drawn = _class_of(rng.uniform(), levels[client])
        while not left[drawn]:
            if refill:
                left[drawn] = len(classes[drawn])
                drawn = _class_of(rng.uniform(), levels[client])
            else:
                drawn = _until_left(np.array(left), priors[client], rng)
        left[drawn] -= 1
        shards[client].append(int(classes[drawn][left[drawn]]))
    return [np.array(shard, dtype=np.int64) for shard in shards]


def _class_of(level: float, prior: list[float]) -> int:
    """The first class at which the cumulative prior reaches the level."""
    return bisect_left(prior, level) % len(prior)


def _until_left(left: Indices, prior: Floats, rng: RandomState) -> int:
    """Draws classes until one has a sample left. Draws many at a time, then rewinds the stream to the right draw."""
    tried = 0
    while tried < CLASS_DRAWS:
        before = rng.get_state()
        drawn = np.searchsorted(prior, rng.uniform(size=min(16 + tried, 2**20))) % len(prior)
        found = np.flatnonzero(left[drawn])
        if len(found):
            rng.set_state(before)
            rng.uniform(size=int(found[0]) + 1)
            return int(drawn[found[0]])
        tried += len(drawn)
    raise SplitError(
        "dirichlet: fedMAN's draws do not end, because the classes of a client with room are used up; "
        "raise alpha, choose another seed, or set split.draws = 'fedflat'"
    )


DRAWS: dict[str, dict[str, Split]] = {
    "fedsol": {"iid": fedsol_iid, "lda": fedsol_lda, "shards": fedsol_shards},
    "fl-simulator": {
        "iid": simulator_iid,
        "dirichlet": simulator_dirichlet,
        "pathological": simulator_pathological,
    },
    "fedman": {"iid": man_iid, "dirichlet": man_dirichlet},
}
