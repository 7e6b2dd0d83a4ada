"""The authors' draws, to the index: against recordings of FedSoL's code, and against slow procedures written out here.

The procedures below use the global legacy generator and plain lists, as the three repositories do.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedflat.errors import FedflatError, RecipeError, SplitError
from fedflat.federation.authors import DRAWS, _class_of, divide
from fedflat.federation.dataset import Dataset, Samples
from fedflat.federation.federating import federate
from fedflat.federation.partition import load as load_partition
from fedflat.recipe import load as recipe

RECORDED = Path(__file__).parent / "recorded"


def some_labels(samples, classes, seed=0):
    """Labels in a random order, every class present, of unequal sizes."""
    labels = np.random.default_rng(seed).integers(0, classes, samples)
    labels[:classes] = np.arange(classes)
    return labels


def lists_of(labels):
    """The indices of each class as a list, in the order of the data set."""
    return [[i for i, label in enumerate(labels) if label == c] for c in range(labels.max() + 1)]


def sorted_lists(shards):
    return [sorted(int(i) for i in shard) for shard in shards]


# FedSoL


def slow_fedsol_iid(labels, m):
    left = np.arange(len(labels))
    found = []
    for _ in range(m):
        np.random.shuffle(left)
        found.append(list(left[: int(len(labels) / m)]))
        left = left[int(len(labels) / m) :]
    return found


def slow_fedsol_lda(labels, m, alpha, min_size=10):
    classes = lists_of(labels)
    smallest = 0
    while smallest < min_size:
        clients = [[] for _ in range(m)]
        for members in classes:
            np.random.shuffle(members)
            open_ = np.array([len(client) for client in clients]) < len(labels) // m
            p = np.random.dirichlet(np.repeat(alpha, m))
            p = p * open_
            p = p / p.sum()
            cuts = [0, *(np.cumsum(p) * len(members)).astype(int)[:-1].tolist(), None]
            for i in range(m):
                clients[i] = clients[i] + members[cuts[i] : cuts[i + 1]]
        smallest = min(len(client) for client in clients)
        for client in clients:
            np.random.shuffle(client)
    return clients


def slow_fedsol_shards(labels, m, shards):
    classes = lists_of(labels)
    each = int(shards * m / len(classes))
    stock = []
    for members in classes:
        rest = len(members) % each
        whole, over = (members[:-rest], members[-rest:]) if rest else (members, [])
        pieces = [list(piece) for piece in np.array(whole, dtype=int).reshape(each, -1)]
        for i, index in enumerate(over):
            pieces[i].append(index)
        stock.append(pieces)
    wanted = np.repeat(np.arange(len(classes)), each)
    np.random.shuffle(wanted)
    wanted = wanted.tolist()
    position = 0
    while len(wanted) % m:
        position += 1
        wanted.append(wanted[position])
    found = []
    for row in np.array(wanted).reshape(m, -1):
        taken = []
        for c in row:
            if stock[c]:
                taken += stock[c].pop(np.random.choice(len(stock[c]), replace=False))
        found.append(taken or found[-1])
    return found


def slow_fedsol_tests(labels, test, clients):
    found = []
    for client in clients:
        share = torch.zeros(int(labels.max()) + 1)
        for i in client:
            share[labels[i]] += 1
        share /= len(client)
        chosen = []
        for c, q in enumerate(share):
            pool = [i for i, label in enumerate(test) if label == c]
            chosen += list(np.random.choice(pool, min(len(pool), int(1000 * q)), replace=False))
        found.append(chosen)
    return found


# FL-Simulator and fedMAN


def slow_in_turn(labels, quota, cumulated, refill):
    classes = lists_of(labels)
    amount = [len(members) for members in classes]
    quota = list(quota)
    found = [[] for _ in quota]
    while sum(quota):
        i = np.random.randint(len(quota))
        if quota[i] <= 0:
            continue
        quota[i] -= 1
        while True:
            c = np.argmax(np.random.uniform() <= cumulated[i])
            if amount[c] <= 0:
                if refill:
                    amount[c] = len(classes[c])
                continue
            amount[c] -= 1
            found[i].append(classes[c][amount[c]])
            break
    return found


def slow_simulator_in_turn(labels, m, priors):
    """Shuffle, then the remainder to client 0, then the priors, then in turn."""
    order = np.random.permutation(len(labels))
    quota = [len(labels) // m + (len(labels) % m if i == 0 else 0) for i in range(m)]
    cumulated = priors(m, labels.max() + 1)
    return [[order[i] for i in client] for client in slow_in_turn(labels[order], quota, cumulated, refill=True)]


def dirichlet_priors(alpha):
    return lambda m, classes: np.cumsum(np.random.dirichlet([alpha] * classes, size=m), axis=1)


def pathological_priors(c):
    def priors(m, classes):
        rows = np.ones([m, classes])
        rows[:, c:] = 0
        for row in rows:
            np.random.shuffle(row)
        cumulated = rows.copy()
        for i, j in np.argwhere(rows):
            cumulated[i, j] = rows[i, : j + 1].sum() / c
        return cumulated

    return priors


def slow_simulator_dirichlet(labels, m, alpha):
    return slow_simulator_in_turn(labels, m, dirichlet_priors(alpha))


def slow_simulator_pathological(labels, m, classes):
    return slow_simulator_in_turn(labels, m, pathological_priors(classes))


def slow_simulator_iid(labels, m):
    order = np.random.permutation(len(labels))
    quota = [len(labels) // m + (len(labels) % m if i == 0 else 0) for i in range(m)]
    ends = np.cumsum([0, *quota])
    return [order[ends[i] : ends[i + 1]] for i in range(m)]


def slow_by_class(labels, m, shuffled):
    order = np.random.permutation(len(labels)) if shuffled else np.arange(len(labels))
    order = order[np.argsort(labels[order].reshape(-1, 1)[:, 0])]
    classes = labels.max() + 1
    each, part = len(labels) // classes, len(labels) // m // classes
    runs = [[order[each * c + part * i : each * c + part * (i + 1)] for c in range(classes)] for i in range(m)]
    return [np.concatenate(run) for run in runs]


def slow_man(labels, m, alpha):
    cumulated = dirichlet_priors(alpha)(m, labels.max() + 1)
    return slow_in_turn(labels, [len(labels) // m] * m, cumulated, refill=False)


CASES = [
    *(("fedsol", "iid", {}, 103, m, seed, slow_fedsol_iid) for m, seed in ((1, 0), (7, 5), (103, 19940817))),
    *(
        ("fedsol", "lda", {"alpha": alpha}, 2000, m, seed, slow_fedsol_lda)
        for alpha, m, seed in ((0.05, 5, 3), (0.1, 20, 19940817), (0.5, 30, 1), (100.0, 13, 2**32 - 1))
    ),
    ("fedsol", "lda", {"alpha": 0.02, "min_size": 1}, 300, 6, 8, slow_fedsol_lda),
    *(
        ("fedsol", "shards", {"shards": s}, 1003, m, seed, slow_fedsol_shards)
        for s, m, seed in ((2, 10, 19940817), (5, 20, 0), (3, 9, 1), (1, 15, 2), (2, 17, 4), (2, 13, 3), (7, 9, 11))
    ),
    *(
        ("fl-simulator", "dirichlet", {"alpha": alpha}, 1003, m, seed, slow_simulator_dirichlet)
        for alpha, m, seed in ((0.01, 10, 20), (0.1, 10, 0), (0.6, 25, 20), (10.0, 4, 7))
    ),
    *(
        ("fl-simulator", "pathological", {"classes": c}, 1003, m, seed, slow_simulator_pathological)
        for c, m, seed in ((1, 10, 20), (3, 10, 20), (6, 25, 1), (10, 4, 7))
    ),
    *(("fl-simulator", "iid", {}, 1003, m, seed, slow_simulator_iid) for m, seed in ((10, 20), (1, 0), (25, 3))),
    *(
        ("fedman", "dirichlet", {"alpha": alpha}, 1003, m, seed, slow_man)
        for alpha, m, seed in ((0.3, 10, 23217), (0.6, 25, 43217), (10.0, 4, 83217), (1.0, 11, 0))
    ),
]


@pytest.mark.parametrize(("draws", "kind", "options", "samples", "clients", "seed", "slow"), CASES)
def test_a_partition_is_the_authors_to_the_index(draws, kind, options, samples, clients, seed, slow):
    labels = some_labels(samples, 10, seed=3)
    np.random.seed(seed)
    expected = sorted_lists(slow(labels, clients, **options))
    shards, tests = divide(draws, kind, labels, clients, seed, **options)
    assert sorted_lists(shards) == expected
    assert tests is None
    assert all(np.array_equal(shard, np.sort(shard)) and shard.dtype == np.int64 for shard in shards)


def test_the_global_generator_is_left_alone():
    before = np.random.get_state()[1].copy()
    divide("fedsol", "lda", some_labels(300, 3), 4, 0, alpha=1.0)
    assert np.array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize(("kind", "options"), [("lda", {"alpha": 0.1}), ("shards", {"shards": 2}), ("iid", {})])
def test_fedsols_local_test_sets_follow_in_the_same_stream(kind, options):
    labels, test = some_labels(1503, 10, 1), some_labels(900, 10, 2)
    slow = {"lda": slow_fedsol_lda, "shards": slow_fedsol_shards, "iid": slow_fedsol_iid}[kind]
    np.random.seed(19940817)
    clients = slow(labels, 15, *options.values())
    expected = sorted_lists(slow_fedsol_tests(labels, test, clients))
    shards, tests = divide("fedsol", kind, labels, 15, 19940817, test=test, **options)
    assert sorted_lists(shards) == sorted_lists(clients)
    assert sorted_lists(tests) == expected


def test_fedsols_shares_are_in_single_precision():
    """1000 · 251/500 is 502, but 501.99… in single precision, whose floor the authors take."""
    labels, test = np.repeat([0, 1], [251, 249]), np.repeat([0, 1], 600)
    np.random.seed(0)
    expected = sorted_lists(slow_fedsol_tests(labels, test, slow_fedsol_iid(labels, 1)))
    _, tests = divide("fedsol", "iid", labels, 1, 0, test=test)
    assert sorted_lists(tests) == expected
    assert np.bincount(test[tests[0]]).tolist() == [501, 498]


def test_a_level_that_rounding_leaves_above_the_prior_means_class_0():
    prior = [0.5, 0.75, 0.9999999999999998]
    for level in 0.0, 0.5, 0.6, 0.75, 0.8, 0.9999999999999999:
        assert _class_of(level, prior) == np.argmax(level <= np.array(prior))


@pytest.mark.parametrize("clients", [1, 100, 500])
def test_cifar100_is_divided_by_class_and_nothing_else_is(clients):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 500))
    for draws, shuffled in ("fl-simulator", True), ("fedman", False):
        np.random.seed(20)
        expected = sorted_lists(slow_by_class(labels, clients, shuffled))
        shards, _ = divide(draws, "iid", labels, clients, 20)
        assert sorted_lists(shards) == expected
        assert all(np.all(np.bincount(labels[shard]) == 500 // clients) for shard in shards)
        assert sorted_lists(divide(draws, "iid", labels, clients, 20, stratified=True)[0]) == expected
    plain, _ = divide("fedman", "iid", labels, clients, 20, stratified=False)
    assert sorted_lists(plain) == np.arange(50_000).reshape(clients, -1).tolist()


def test_fedman_cuts_what_is_not_cifar100_in_a_row_and_leaves_the_rest():
    shards, _ = divide("fedman", "iid", some_labels(103, 10), 10, 23217)
    assert sorted_lists(shards) == np.arange(100).reshape(10, 10).tolist()


def test_fedman_reads_tiny_imagenet_in_the_order_of_a_shuffling_loader():
    labels = np.repeat(np.arange(200), 500)
    torch.manual_seed(23217)
    train = DataLoader(TensorDataset(torch.arange(len(labels))), batch_size=len(labels), shuffle=True)
    test = DataLoader(TensorDataset(torch.arange(10)), batch_size=10, shuffle=False)
    train_batches, _ = iter(train), iter(test)
    order = next(train_batches)[0].numpy()
    shards, _ = divide("fedman", "iid", labels, 100, 23217)
    assert sorted_lists(shards) == np.sort(order.reshape(100, -1), axis=1).tolist()


def test_an_exhausted_class_costs_as_many_draws_as_it_takes(monkeypatch):
    """With little of a class left over, fedMAN draws thousands of classes for one sample; ours draws them in blocks."""
    monkeypatch.setattr("fedflat.federation.authors.CLASS_DRAWS", 2**16)
    labels = np.repeat(np.arange(3), 40)
    for seed in (0, 3, 9):
        np.random.seed(seed)
        expected = sorted_lists(slow_man(labels, 3, 0.4))
        assert sorted_lists(divide("fedman", "dirichlet", labels, 3, seed, alpha=0.4)[0]) == expected
    with pytest.raises(SplitError, match="fedMAN's draws do not end"):
        divide("fedman", "dirichlet", labels, 3, 1, alpha=0.4)


@pytest.mark.parametrize(
    ("draws", "kind", "options", "sentence"),
    [
        ("fedsol", "dirichlet", {"alpha": 1.0}, "no split 'dirichlet', only iid, lda and shards"),
        ("fedsol", "natural", {}, "no split 'natural'"),
        ("fl-simulator", "lda", {"alpha": 1.0}, "no split 'lda', only iid, dirichlet and pathological"),
        ("fl-simulator", "dirichlet", {"alpha": 1.0, "refill": False}, "refill = true"),
        ("fl-simulator", "pathological", {"classes": 11}, "from 1 to 10"),
        ("fedman", "pathological", {"classes": 2}, "no split 'pathological', only iid and dirichlet"),
        ("fedman", "dirichlet", {"alpha": 1.0, "refill": True}, "refill = false"),
        ("fedman", "iid", {"stratified": True}, "classes of equal size"),
        ("fedsol", "iid", {"stratified": True}, "unknown option 'stratified'"),
        ("fedsol", "lda", {}, "option 'alpha' is missing"),
        ("fedsol", "lda", {"alpha": 1e-4}, "times in a row"),
        ("fedsol", "shards", {"shards": 1}, "cannot cover 10 classes"),
    ],
)
def test_what_the_authors_do_not_have_is_refused_in_one_sentence(draws, kind, options, sentence, monkeypatch):
    monkeypatch.setattr("fedflat.federation.authors.LDA_DRAWS", 20)
    with pytest.raises(FedflatError, match=sentence) as refusal:
        divide(draws, kind, some_labels(203, 10), 9, 0, **options)
    assert "\n" not in str(refusal.value)


def test_a_seed_that_the_legacy_generator_cannot_take_is_refused():
    with pytest.raises(RecipeError, match=r"split.seed = 4294967296: .* below 2\*\*32"):
        divide("fedsol", "iid", some_labels(20, 2), 2, 2**32)


def test_each_preset_has_its_authors_draws():
    for preset, draws in ("sol", "fedsol"), ("smoo", "fl-simulator"), ("man", "fedman"):
        made = recipe(preset)
        assert (made.split.draws, made.server.draws) == (draws, draws)
        assert made.split.name in DRAWS[draws]
        assert made.essentials()["split"]["draws"] == made.essentials()["server"]["draws"] == draws
    assert recipe("default").split.draws == recipe("default").server.draws == "fedflat"
    assert recipe("sol", ["split=shards", "split.shards=2"]).split.draws == "fedsol"


def test_a_federation_has_the_authors_partition_and_test_sets():
    samples = Samples(torch.zeros(600, 1, 2, 2), torch.from_numpy(some_labels(600, 5)))
    data = Dataset("mine", samples, samples, 5, (), ())
    federation = federate(data, "lda", 6, seed=4, draws="fedsol", alpha=0.5)
    shards, tests = divide("fedsol", "lda", samples.labels.numpy(), 6, 4, test=samples.labels.numpy(), alpha=0.5)
    assert sorted_lists(federation.shards) == sorted_lists(shards)
    assert sorted_lists(federation.local_tests(seed=9)) == sorted_lists(tests)
    assert sorted_lists(federation.local_tests(9, 50)) != sorted_lists(federation.local_tests(9))
    with pytest.raises(RecipeError, match="did you mean fedsol"):
        federate(data, "lda", 6, draws="fedsoll", alpha=0.5)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("lda0.1", "lda", {"alpha": 0.1}), ("lda0.5", "lda", {"alpha": 0.5}), ("shards2", "shards", {"shards": 2})],
)
def test_cifar10_is_divided_as_fedsols_own_code_divided_it(name, kind, options):
    two = np.load(RECORDED / "cifar10-labels.npz")["packed"].astype(np.int64)  # two labels a byte
    labels = np.stack([two >> 4, two & 15], axis=1).ravel()
    recorded = load_partition(RECORDED / f"fedsol-cifar10-{name}.npz")
    shards, _ = divide("fedsol", kind, labels, 100, 19940817, **options)
    assert sorted_lists(shards) == sorted_lists(recorded)


def test_fedsols_lda_that_cannot_succeed_is_refused_before_it_is_drawn(monkeypatch):
    monkeypatch.setattr("fedflat.federation.authors.LDA_DRAWS", 0)
    with pytest.raises(SplitError, match="20 clients with min_size 10 need 200 samples but there are only 199"):
        divide("fedsol", "lda", some_labels(199, 10), 20, 0, alpha=0.5)
