"""Partitions: nothing lost, nothing shared unless the paper says so, always an end, and the distribution promised."""

import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.errors import DataError, FedflatError, RecipeError, SplitError
from fedflat.federation.partition import counts, load, matched_test, partition, save
from fedflat.federation.splits import SPLITS

fast = settings(max_examples=60, deadline=None, database=None)

seeds = st.integers(0, 2**32 - 1)
alphas = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
label_lists = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(lambda values: np.array(values, dtype=np.int64))
options_of = {
    "iid": st.fixed_dictionaries({"stratified": st.booleans()}),
    "dirichlet": st.fixed_dictionaries({"alpha": alphas, "refill": st.booleans()}),
    "lda": st.fixed_dictionaries({"alpha": alphas, "min_size": st.integers(1, 5)}),
    "pathological": st.fixed_dictionaries({"classes": st.integers(1, 7)}),
    "shards": st.fixed_dictionaries({"shards": st.integers(1, 8)}),
    "natural": st.just({}),
    "sizes": st.fixed_dictionaries({"exponent": st.floats(0, 10)}),
}


def rng(seed=0):
    return np.random.default_rng(seed)


def balanced(samples, classes):
    return np.arange(samples, dtype=np.int64) % classes


def sizes_of(shards):
    return np.array([len(shard) for shard in shards])


def with_replacement(kind, options):
    return kind == "pathological" or options.get("refill", False)


def attempt(action, *args, **kwargs):
    """What the action returns, or the sentence with which it refuses."""
    try:
        return action(*args, **kwargs), ""
    except FedflatError as error:
        return None, str(error)


def assert_partition(shards, samples):
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(samples))


class Counting(np.random.Generator):
    """A generator that counts the variates it was asked for: the work of a split, whatever the machine."""

    def __init__(self, seed=0):
        super().__init__(np.random.PCG64(seed))
        self.variates = 0

    def random(self, size=None, *args, **kwargs):
        self.variates += 1 if size is None else int(np.prod(size))
        return super().random(size, *args, **kwargs)

    def standard_gamma(self, shape, size=None, *args, **kwargs):
        self.variates += int(np.prod(size))
        return super().standard_gamma(shape, size, *args, **kwargs)


# What every split promises


def test_every_split_is_tested():
    assert set(options_of) == set(SPLITS)


@pytest.mark.parametrize("kind", SPLITS)
@fast
@given(data=st.data(), labels=label_lists, clients=st.integers(1, 90), seed=seeds)
def test_a_split_divides_everything_or_says_in_one_sentence_why_not(kind, data, labels, clients, seed):
    options = data.draw(options_of[kind])
    groups = np.arange(len(labels)) % data.draw(st.integers(1, 90))
    shards, complaint = attempt(partition, kind, labels, clients, rng(seed), groups=groups, **options)
    if shards is None:
        assert complaint.startswith(f"{kind}: ")
        assert "\n" not in complaint
        return
    assert len(shards) == clients
    assert all(len(shard) > 0 and shard.dtype == np.int64 for shard in shards)
    assert all(np.all(np.diff(shard) >= 0) for shard in shards)
    if with_replacement(kind, options):
        assert sum(map(len, shards)) == len(labels)
        assert set(np.concatenate(shards)) <= set(range(len(labels)))
    else:
        assert_partition(shards, len(labels))


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological", "sizes", "lda"])
@fast
@given(data=st.data(), labels=label_lists, seed=seeds)
def test_no_split_by_label_refuses_what_is_possible(kind, data, labels, seed):
    clients = data.draw(st.integers(1, len(labels)))
    options = data.draw(options_of[kind])
    if kind == "pathological":
        options["classes"] = data.draw(st.integers(1, len(np.unique(labels))))
    if kind == "lda":
        options["min_size"] = data.draw(st.integers(1, len(labels) // clients))
    shards = partition(kind, labels, clients, rng(seed), **options)
    if kind == "lda":
        assert min(map(len, shards)) >= options["min_size"]
    elif kind != "sizes":
        assert np.ptp(sizes_of(shards)) <= 1


every_kind = pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("iid", {}),
        ("iid", {"stratified": True}),
        ("dirichlet", {"alpha": 0.3}),
        ("dirichlet", {"alpha": 1e-3}),
        ("dirichlet", {"alpha": 1e-3, "refill": True}),
        ("dirichlet", {"alpha": 1e3, "refill": True}),
        ("lda", {"alpha": 0.1, "min_size": 1}),
        ("lda", {"alpha": 1e-3, "min_size": 6}),
        ("lda", {"alpha": 1e3, "min_size": 2}),
        ("pathological", {"classes": 3}),
        ("shards", {"shards": 2}),
        ("natural", {}),
        ("sizes", {"exponent": 1.5}),
    ],
)


@every_kind
def test_ten_thousand_clients_share_sixty_thousand_samples(kind, options):
    labels = balanced(60_000, 10)
    shards = partition(kind, labels, 10_000, rng(), groups=rng(1).permutation(60_000) % 12_000, **options)
    assert len(shards) == 10_000
    assert min(map(len, shards)) >= options.get("min_size", 1)
    if with_replacement(kind, options):
        assert set(sizes_of(shards)) == {6}
    else:
        assert_partition(shards, 60_000)


@every_kind
def test_the_generator_alone_decides(kind, options):
    labels, groups = balanced(600, 10), np.arange(600) // 6
    before = np.random.get_state()[1].copy()
    first, again, other = (partition(kind, labels, 50, rng(seed), groups=groups, **options) for seed in (7, 7, 8))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("kind", ["dirichlet", "lda", "pathological", "shards"])
def test_classes_are_the_labels_that_occur(kind):
    labels = np.repeat([3, 700_000], 60)
    options = {
        "dirichlet": {"alpha": 0.1},
        "lda": {"alpha": 0.1},
        "pathological": {"classes": 2},
        "shards": {"shards": 2},
    }
    assert sum(map(len, partition(kind, labels, 6, rng(), **options[kind]))) == 120


# iid


@fast
@given(labels=label_lists, clients=st.integers(1, 20), seed=seeds)
def test_stratified_clients_differ_by_at_most_one_in_every_class(labels, clients, seed):
    table = counts(labels, SPLITS["iid"](labels, clients, rng(seed), stratified=True), 7)
    assert np.ptp(table, axis=0).max() <= 1
    assert np.ptp(table.sum(axis=1)) <= 1


# dirichlet


def test_dirichlet_with_refill_has_the_moments_of_its_law():
    """Counts of n draws from q ~ Dir(α·1_C) have mean n/C and variance n·(1/C)(1 − 1/C)·(n + Cα)/(1 + Cα)."""
    clients, classes, n = 2_000, 10, 30
    labels = balanced(clients * n, classes)
    for alpha in (0.1, 0.6, 10.0):
        table = counts(labels, partition("dirichlet", labels, clients, rng(), alpha=alpha, refill=True), classes)
        total = classes * alpha
        variance = n * 0.1 * 0.9 * (n + total) / (1 + total)
        assert table.mean(axis=0) == pytest.approx(n / classes, abs=5 * np.sqrt(variance / clients))
        assert table.var() == pytest.approx(variance, rel=0.06)


@pytest.mark.parametrize("refill", [True, False])
def test_a_large_alpha_is_nearly_iid(refill):
    labels = balanced(20_000, 10)
    table = counts(labels, partition("dirichlet", labels, 20, rng(), alpha=1e3, refill=refill), 10)
    spread = np.sqrt(1_000 * 0.1 * 0.9 * 11_000 / 10_001)
    assert np.abs(table - 100).max() < 6 * spread


@pytest.mark.parametrize("alpha", [1e-3, 1e-6])
def test_a_small_alpha_gives_one_class_per_client_and_every_class_its_share(alpha):
    labels = balanced(20_000, 10)
    table = counts(labels, partition("dirichlet", labels, 1_000, rng(), alpha=alpha, refill=True), 10)
    assert (table.max(axis=1) / table.sum(axis=1)).mean() > 0.99
    favourites = np.bincount(table.argmax(axis=1), minlength=10)
    assert np.sum((favourites - 100) ** 2 / 100) < 33.7  # χ² with 9 degrees of freedom, p = 1e-4


def test_without_refill_small_alpha_still_separates_classes():
    labels = balanced(20_000, 10)
    table = counts(labels, partition("dirichlet", labels, 1_000, rng(), alpha=1e-3), 10)
    assert np.array_equal(table.sum(axis=0), np.full(10, 2_000))
    assert (table.max(axis=1) / table.sum(axis=1)).mean() > 0.85
    assert (table > 0).sum(axis=1).mean() < 1.5  # who finds a class exhausted turns to its second choice, not to all


def test_refill_shares_samples_only_when_a_class_runs_out():
    labels = np.repeat([0, 1], [1, 999])
    held = np.concatenate(partition("dirichlet", labels, 10, rng(), alpha=1e3, refill=True))
    only_one, many = held[held == 0], held[held > 0]
    assert len(only_one) == pytest.approx(500, abs=5 * np.sqrt(250))
    assert len(np.unique(many)) == len(many)


@fast
@given(labels=label_lists, alpha=alphas, seed=seeds)
def test_dirichlet_without_refill_ends_after_at_most_three_uniforms_per_sample(labels, alpha, seed):
    counting = Counting(seed)
    partition("dirichlet", labels, min(8, len(labels)), counting, alpha=alpha)
    gammas = min(8, len(labels)) * len(np.unique(labels))
    assert counting.variates <= 3 * len(labels) + gammas


# lda


def test_lda_gives_up_drawing_after_bounded_work_and_keeps_its_promise():
    counting = Counting()
    shards = partition("lda", balanced(1_000, 10), 100, counting, alpha=1e-3, min_size=10)
    assert counting.variates <= 201 * 100 * 10
    assert set(sizes_of(shards)) == {10}
    assert_partition(shards, 1_000)


def test_lda_draws_once_when_the_first_draw_will_do():
    counting = Counting()
    partition("lda", balanced(5_000, 10), 10, counting, alpha=100.0)
    assert counting.variates == 10 * 10


def test_lda_sizes_differ_and_nobody_grows_after_reaching_the_mean():
    labels = balanced(50_000, 10)
    shards = partition("lda", labels, 100, rng(), alpha=0.1)
    assert min(map(len, shards)) >= 10
    assert np.std(sizes_of(shards)) > 100
    table = counts(labels, shards, 10)
    before_last = table.sum(axis=1) - np.array([row[np.flatnonzero(row)[-1]] for row in table])
    assert before_last.max() < 500


def test_lda_follows_alpha():
    labels = balanced(20_000, 10)
    skewed, even = (
        counts(labels, partition("lda", labels, 20, rng(), alpha=alpha, min_size=1), 10) for alpha in (1e-3, 1e3)
    )
    assert np.abs(even[:, :5] - 100).max() < 25  # later classes only go to those below the mean
    assert np.median((skewed > 0).sum(axis=1)) <= 2


def test_lifting_a_client_leaves_it_with_few_classes():
    labels = balanced(10_000, 10)
    table = counts(labels, partition("lda", labels, 100, rng(), alpha=1e-3, min_size=20), 10)
    assert table.sum(axis=1).min() == 20
    assert np.mean((table > 0).sum(axis=1)) < 2


# pathological and shards


@fast
@given(data=st.data(), classes=st.integers(1, 6), clients=st.integers(1, 12), seed=seeds)
def test_a_pathological_client_holds_no_more_than_its_classes(data, classes, clients, seed):
    labels = balanced(240, 6)
    table = counts(labels, partition("pathological", labels, clients, rng(seed), classes=classes), 6)
    assert (table > 0).sum(axis=1).max() <= classes


def test_pathological_classes_are_chosen_evenly_and_drawn_evenly():
    labels = balanced(40_000, 10)
    table = counts(labels, partition("pathological", labels, 1_000, rng(), classes=3), 10)
    held = table > 0
    assert set(held.sum(axis=1)) == {3}
    assert np.abs(held.sum(axis=0) - 300).max() < 5 * np.sqrt(1_000 * 0.3 * 0.7)
    assert table[held].mean() == pytest.approx(40 / 3)
    assert table[held].var() == pytest.approx(40 * (1 / 3) * (2 / 3), rel=0.1)


@pytest.mark.parametrize("per_client", [2, 5, 10])
def test_shards_are_equal_and_of_few_classes(per_client):
    labels = balanced(50_000, 10)
    shards = partition("shards", labels, 100, rng(), shards=per_client)
    assert set(sizes_of(shards)) == {500}
    table = counts(labels, shards, 10)
    assert (table > 0).sum(axis=1).max() <= per_client
    assert np.all(table % (500 // per_client) == 0)


def test_shards_are_dealt_at_random():
    table = counts(balanced(5_000, 10), partition("shards", balanced(5_000, 10), 100, rng(), shards=2), 10)
    assert len(np.unique(table > 0, axis=0)) > 25  # of the 55 pairs of classes


def test_shards_that_do_not_fit_the_classes_are_still_all_given_out():
    labels = balanced(7_000, 7)
    shards = partition("shards", labels, 10, rng(), shards=3)
    assert_partition(shards, 7_000)
    assert set(np.unique(counts(labels, shards, 7))) <= {0, 200, 250, 400, 450, 500, 600, 650, 750}


# natural and sizes


def test_natural_is_one_client_per_writer():
    writers = np.array(["zoe", "ann", "zoe", "bob", "ann"])
    for clients in (0, 3):
        shards = partition("natural", np.zeros(5, dtype=np.int64), clients, rng(), groups=writers)
        assert [shard.tolist() for shard in shards] == [[1, 4], [3], [0, 2]]


@fast
@given(groups=st.lists(st.integers(0, 15), min_size=1, max_size=100), data=st.data(), seed=seeds)
def test_merged_writers_stay_whole_and_balanced(groups, data, seed):
    groups = np.array(groups)
    clients = data.draw(st.integers(1, len(np.unique(groups))))
    shards = partition("natural", np.zeros(len(groups), dtype=np.int64), clients, rng(seed), groups=groups)
    assert sum(len(np.unique(groups[shard])) for shard in shards) == len(np.unique(groups))
    assert clients == len(np.unique(groups)) or np.ptp(sizes_of(shards)) <= np.bincount(groups).max()


def test_the_largest_writers_are_placed_first():
    writers = np.array([0, 1, 2, 3, 4, 4, 4, 4])
    shards = partition("natural", np.zeros(8, dtype=np.int64), 2, rng(), groups=writers)
    assert sorted(shard.tolist() for shard in shards) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@fast
@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=12), unit=st.integers(1, 9), seed=seeds)
def test_sizes_that_divide_exactly_are_met_exactly(weights, unit, seed):
    labels = np.zeros(sum(weights) * unit, dtype=np.int64)
    shards = partition("sizes", labels, len(weights), rng(seed), sizes=[weight / 8 for weight in weights])
    assert sizes_of(shards).tolist() == [weight * unit for weight in weights]


def test_what_rounding_leaves_goes_to_the_largest_remainders():
    shards = partition("sizes", balanced(10, 2), 3, rng(), sizes=[54, 27, 19])
    assert sizes_of(shards).tolist() == [5, 3, 2]


def test_the_power_law_is_rounded_by_less_than_one():
    clients = np.arange(1, 21)
    shards = partition("sizes", balanced(10_000, 10), 20, rng(), exponent=1.3)
    exact = 10_000 * clients**-1.3 / np.sum(clients**-1.3)
    assert np.abs(sizes_of(shards) - exact).max() < 1


# What a user is told


@pytest.mark.parametrize(
    ("kind", "clients", "options", "message"),
    [
        ("dirichlt", 5, {}, "split 'dirichlt' is unknown; did you mean dirichlet?"),
        ("iid", 0, {}, "iid: clients must be at least 1, got 0"),
        ("natural", -1, {}, "natural: clients must be at least 1, got -1"),
        ("dirichlet", 5, {"alpha": 0}, "dirichlet: alpha must be a number from 1e-6 to 1e6; got 0"),
        ("dirichlet", 5, {"alpha": float("nan")}, "alpha must be a number from 1e-6 to 1e6; got nan"),
        ("dirichlet", 5, {"alpha": True}, "alpha must be a number from 1e-6 to 1e6; got True"),
        ("dirichlet", 5, {"alpha": "0.1"}, "alpha must be a number from 1e-6 to 1e6; got '0.1'"),
        ("dirichlet", 5, {"alpha": 1.0, "refil": True}, "unknown option 'refil'; did you mean refill?"),
        ("dirichlet", 5, {"alpha": 1.0, "refill": 1}, "refill must be true or false; got 1"),
        ("natural", 5, {"alpha": 1.0}, "natural: unknown option 'alpha'; it takes none"),
        ("lda", 5, {"alpha": 1.0, "min_size": 2.5}, "min_size must be a whole number, 1 or more; got 2.5"),
        ("pathological", 5, {"classes": 11}, "classes must be from 1 to 10, the classes in the data; got 11"),
        ("pathological", 5, {"classes": 0}, "classes must be a whole number, 1 or more; got 0"),
        ("shards", 5, {"shards": 0}, "shards must be a whole number, 1 or more; got 0"),
        ("sizes", 5, {}, "sizes: give either the option sizes or the option exponent"),
        ("sizes", 3, {"sizes": [1, 2]}, "sizes: 2 sizes for 3 clients; give one per client"),
        ("sizes", 2, {"sizes": [1, 0]}, "sizes must be a list of positive numbers; got [1, 0]"),
        ("sizes", 2, {"sizes": "12"}, "sizes must be a list of positive numbers; got '12'"),
    ],
)
def test_a_wrong_option_is_named(kind, clients, options, message):
    with pytest.raises(RecipeError) as caught:
        partition(kind, balanced(50, 10), clients, rng(), **options)
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    ("kind", "clients", "options", "message"),
    [
        ("dirichlet", 60, {"alpha": 0.1}, "dirichlet: 60 clients but only 50 samples; lower clients to at most 50"),
        (
            "lda",
            10,
            {"alpha": 0.1},
            "lda: 10 clients with min_size 10 need 100 samples but there are only 50; lower min_size to at most 5",
        ),
        (
            "shards",
            3,
            {"shards": 2},
            "shards: 3 clients with 2 shards each cannot cover 10 classes; raise shards to at least 4",
        ),
        (
            "shards",
            10,
            {"shards": 10**12},
            "shards: 10 clients with 1000000000000 shards each need more than 50 samples; lower shards to at most 5",
        ),
        ("natural", 5, {}, "natural: this dataset has no groups; choose a dataset with writers or another split"),
        (
            "natural",
            5,
            {"groups": np.zeros(50)},
            "natural: 5 clients but only 1 groups; lower clients to 1, or set it to 0 for one client per group",
        ),
        ("natural", 5, {"groups": np.zeros(49)}, "natural: 49 group ids for 50 samples; give one per sample"),
    ],
)
def test_an_impossible_split_says_which_number_to_change(kind, clients, options, message):
    with pytest.raises(SplitError) as caught:
        partition(kind, balanced(50, 10), clients, rng(), **options)
    assert str(caught.value) == message


def test_no_client_is_ever_empty():
    labels = np.repeat([0, 1], [1, 99])
    with pytest.raises(
        SplitError, match="shards: 9 of 20 clients would get no sample; lower clients or change the split"
    ):
        partition("shards", labels, 20, rng(), shards=1)
    with pytest.raises(SplitError, match="iid: there are no samples to divide"):
        partition("iid", labels[:0], 1, rng())


# Tables, test sets, files


def test_counts_is_the_table_of_clients_by_classes():
    labels = np.array([0, 1, 1, 3])
    assert counts(labels, [np.array([0, 1, 2]), np.array([3, 3])], 4).tolist() == [[1, 2, 0, 0], [0, 0, 0, 2]]


@fast
@given(
    row=st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    test_labels=st.lists(st.integers(0, 2), max_size=60).map(lambda values: np.array(values, dtype=np.int64)),
    size=st.integers(0, 100),
    seed=seeds,
)
def test_a_matched_test_set_takes_the_floor_of_each_share_or_all_there_is(row, test_labels, size, seed):
    chosen = matched_test(np.array(row), test_labels, rng(seed), size)
    assert np.all(np.diff(chosen) > 0)
    taken = np.bincount(test_labels[chosen], minlength=3)
    available = np.bincount(test_labels, minlength=3)
    assert taken.tolist() == [min(n, size * k // sum(row)) for n, k in zip(available, row, strict=True)]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "clients"
    save(path, partition("lda", balanced(500, 10), 10, rng(), alpha=0.1))
    return path


@fast
@given(shards=st.lists(st.lists(st.integers(0, 2**62), max_size=5), min_size=1, max_size=9))
def test_a_saved_partition_comes_back(tmp_path_factory, shards):
    path = tmp_path_factory.mktemp("partition") / "clients.npz"
    save(path, [np.array(shard, dtype=np.int64) for shard in shards])
    assert [shard.tolist() for shard in load(path)] == shards


def test_saving_writes_the_same_bytes_again(saved):
    before = saved.read_bytes()
    save(saved, load(saved))
    assert saved.read_bytes() == before


def test_a_damaged_file_is_refused_or_harmlessly_damaged(saved):
    content, original = saved.read_bytes(), load(saved)
    for place in range(0, len(content), 2):
        saved.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        shards, complaint = attempt(load, saved)
        assert complaint.startswith(str(saved)) or all(map(np.array_equal, shards, original))
    for length in range(0, len(content), 7):
        saved.write_bytes(content[:length])
        with pytest.raises(DataError):
            load(saved)


@pytest.mark.parametrize(
    ("indices", "offsets"),
    [
        ([0, 1, 2], [0, 2]),
        ([0, 1, 2], [1, 3]),
        ([0, 1, 2], [0, 2, 1, 3]),
        ([0, -1, 2], [0, 3]),
        ([0.0, 1.0], [0, 2]),
        ([[0, 1]], [0, 1]),
        ([], [0]),
    ],
)
def test_offsets_must_divide_the_indices(tmp_path, indices, offsets):
    path = tmp_path / "clients.npz"
    np.savez(path, indices=np.array(indices), offsets=np.array(offsets))
    with pytest.raises(DataError, match="offsets do not divide its indices"):
        load(path)


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "clients.npz"
    with pytest.raises(DataError, match="cannot be read"):
        load(path)
    with pytest.raises(DataError, match="cannot be written"):
        save(path / "deeper", [np.arange(2)])
    path.write_bytes(pickle.dumps({"indices": [0], "offsets": [0, 1]}))
    with pytest.raises(DataError, match="not a partition file"):
        load(path)
    np.savez(path, indices=np.array([{}], dtype=object), offsets=np.array([0, 1]))
    with pytest.raises(DataError, match="not a partition file"):
        load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "nothing here")
    with pytest.raises(DataError, match="not a partition file"):
        load(path)
