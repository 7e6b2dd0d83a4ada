"""The authors' own draws: the partitions that three public repositories make, to the index.

| draws          | repository                   | splits                                              |
|----------------|------------------------------|-----------------------------------------------------|
| `fedsol`       | Lee-Gihun/FedSOL             | iid, lda, shards; and label-matched test sets       |
| `fl-simulator` | woodenchild95/FL-Simulator   | iid, dirichlet (with refill), pathological          |
| `fedman`       | vcl-iisc/fedMAN              | iid, dirichlet (without refill)                     |

They draw by NumPy's legacy generator, whose stream NumPy has frozen. So every call below has its place: what is drawn
is discarded, repeated or left over exactly where the authors' code does so. A split maps `(labels, clients, rng, *,
options)` to one index array per client; samples that do not divide evenly are left out or go to client 0, as theirs do.
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
LDA_DRAWS = 100_000  # minutes; for 100 clients at α = 0.05, CIFAR-10 takes 3,482 and MNIST 17,293
CLASS_DRAWS = 2**27  # some seconds


def divide(
    draws: str, kind: str, labels: Indices, clients: int, seed: int, *, test: Indices | None = None, **options: Any
) -> tuple[Shards, Shards | None]:
    """The partition that the authors' code makes from its seed, sorted within a client, and its local test sets.

    Args:
        draws: `fedsol`, `fl-simulator` or `fedman`.
        kind: The split, one of those that the authors' code has.
        labels: The training labels, in the order of the data set's own files.
        clients: Number of clients m.
        seed: The seed of their partition: 19940817 in FedSoL's code, 20 in FL-Simulator's, 23217 in fedMAN's.
        test: The test labels, for FedSoL's local test sets.
        options: The options of that split.

    Returns:
        Each client's training samples, and each client's test samples if the authors draw them (FedSoL) or None.

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
    """The splits that can be drawn so, by name; `fedflat` means our own."""
    return SPLITS if draws == "fedflat" else HOUSES[draws]


def _split(draws: str, kind: str) -> Split:
    if kind in HOUSES[draws]:
        return HOUSES[draws][kind]
    *others, last = HOUSES[draws]
    raise RecipeError(
        f"split.draws = {draws!r}: those authors have no split {kind!r}, only {', '.join(others)} and {last}; "
        "choose one of them, or split.draws = 'fedflat'"
    )


def _loaded(draws: str, labels: Indices, seed: int) -> Indices:
    """The order in which the authors' code reads the data set: the files' own, but for fedMAN's Tiny-ImageNet.

    There a shuffling torch loader comes first, with torch's generator at the same seed. Two loaders are opened before
    the first batch is asked for, and each takes a number; the next one seeds the permutation.
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
    """⌊N/m⌋ samples each: before every client what is left is shuffled again. The last N mod m stay out."""
    size = len(labels) // clients
    left = np.arange(len(labels))
    shards = []
    for _ in range(clients):
        rng.shuffle(left)
        shards.append(left[:size])
        left = left[size:]
    return shards


def fedsol_lda(labels: Indices, clients: int, rng: RandomState, *, alpha: float, min_size: int = 10) -> Shards:
    """Each class is cut at ⌊n_c · cumsum(p)⌋, p ~ Dir(α·1_m), zero for clients with ⌊N/m⌋ samples or more.

    All is drawn again until everyone has `min_size` (10 in the authors' code); the classes stay shuffled from draw to
    draw. The authors' loop has no end; ours gives up.
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
        for size in held:  # each client's samples; only what this takes from the stream matters, for we sort them
            rng.shuffle(np.empty(size, dtype=np.int64))
        if held.min() >= min_size:
            pieces = [np.split(pool, ends) for pool, ends in zip(classes, cuts, strict=True)]
            return [np.concatenate(client) for client in zip(*pieces, strict=True)]
    raise SplitError(
        f"lda: FedSoL's draws gave some client fewer than {min_size} samples {LDA_DRAWS:,} times in a row; "
        "raise alpha, lower clients, or set split.draws = 'fedflat'"
    )


def _lda_cuts(samples: int, alpha: float, below: NDArray[np.bool_], rng: RandomState) -> Indices:
    """Where a class is cut; clients that are not `below` the mean size get nothing."""
    with np.errstate(invalid="ignore"):
        share = rng.dirichlet(np.repeat(alpha, len(below))) * below
        share /= share.sum()
    # If nobody has a share, that is 0/0. Their cuts are then such that the last client takes the whole class.
    return np.nan_to_num(np.cumsum(share) * samples).astype(np.int64)[:-1]


def fedsol_shards(labels: Indices, clients: int, rng: RandomState, *, shards: int) -> Shards:
    """Every class in ⌊s·m/C⌋ shards of neighbours; clients take the classes of a shuffled list, and of each any shard.

    If m does not divide the length of the list, the last clients go short. (The authors lengthen it by some of its own
    entries, but by then no shards are left.) A client that finds none at all holds what the client before it holds.
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
            raise SplitError("shards: FedSoL's draws leave client 0 without a shard; choose another seed or number")
        division.append(np.concatenate(taken) if taken else division[-1])
    return division


def _equal_shards(pool: Indices, pieces: int) -> list[Indices]:
    """Neighbours together; what does not divide evenly, from the end of the class, goes one each to the first."""
    size = len(pool) // pieces
    leftover = pool[size * pieces :]
    return [np.append(pool[i * size : (i + 1) * size], leftover[i : i + 1]) for i in range(pieces)]


def _matched_tests(labels: Indices, shards: Shards, test: Indices, rng: RandomState) -> Shards:
    """FedSoL's local test sets: of each class c a choice of ⌊1000 · q_c⌋ test samples, or all there are.

    q is a client's label distribution in single precision, and so is the product: a floor may be one too low. The draw
    follows upon the partition's, in the same stream.
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
    """The shuffled training set cut in a row; client 0 takes the N mod m left over. CIFAR-100 is divided by class."""
    order = rng.permutation(len(labels))
    if _by_class(labels, stratified):
        return [order[shard] for shard in _stratified(labels[order], clients)]
    return np.split(order, np.cumsum(_rest_to_first(len(labels), clients))[:-1])


def simulator_dirichlet(
    labels: Indices, clients: int, rng: RandomState, *, alpha: float, refill: bool = True
) -> Shards:
    """Equal sizes, classes from q_i ~ Dir(α·1_C). An exhausted class is filled again, and the class drawn anew."""
    if not refill:
        raise RecipeError("split.draws = 'fl-simulator': its dirichlet has refill = true; choose draws = 'fedman'")
    order = rng.permutation(len(labels))
    priors = rng.dirichlet([alpha] * len(np.unique(labels)), size=clients).cumsum(axis=1)
    room = _rest_to_first(len(labels), clients)
    return [order[shard] for shard in _in_turn(labels[order], room, priors, rng, refill=True)]


def simulator_pathological(labels: Indices, clients: int, rng: RandomState, *, classes: int) -> Shards:
    """As dirichlet with refill, but q_i is uniform on c classes: a row of c ones and C − c zeros, shuffled."""
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
    """The training set cut in a row, not shuffled; the last N mod m stay out. CIFAR-100 is divided by class."""
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
    """What the recipe says, or else what the authors do: they divide CIFAR-100, and only that, by class."""
    return _balanced(labels, classes=100, each=500) if stratified is None else stratified


def _stratified(labels: Indices, clients: int) -> Shards:
    """Client i takes the i-th run of each class. Which samples these are is up to NumPy's sort, which is not stable."""
    classes = len(np.unique(labels))
    each, rest = divmod(len(labels), classes)
    if rest or each % clients or not _balanced(labels, classes, each):
        raise SplitError(
            f"iid: to divide by class, these authors need equal classes whose size {clients} clients divide; "
            "change clients, or set split.draws = 'fedflat'"
        )
    # Theirs has the default sort, and so must ours. Its order among equals depends on NumPy's version and processor.
    runs = np.argsort(labels).reshape(classes, clients, -1)
    return [runs[:, i].ravel() for i in range(clients)]


def _in_turn(labels: Indices, room: Indices, priors: Floats, rng: RandomState, *, refill: bool) -> Shards:
    """Until all are full: draw a client, and its class; it gets the last sample of that class that is not yet taken.

    A client without room costs a draw, and so does an exhausted class. `priors` are cumulated; a level above the last
    entry, which rounding may leave below 1, means class 0 (the argmax of all False).
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
    """The first class at which the cumulated prior reaches the level."""
    return bisect_left(prior, level) % len(prior)


def _until_left(left: Indices, prior: Floats, rng: RandomState) -> int:
    """Draw classes until one has a sample left: many at a time, and then the stream is wound back to that draw."""
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


HOUSES: dict[str, dict[str, Split]] = {
    "fedsol": {"iid": fedsol_iid, "lda": fedsol_lda, "shards": fedsol_shards},
    "fl-simulator": {
        "iid": simulator_iid,
        "dirichlet": simulator_dirichlet,
        "pathological": simulator_pathological,
    },
    "fedman": {"iid": man_iid, "dirichlet": man_dirichlet},
}
