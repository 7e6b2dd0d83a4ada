"""Data the way people have them become a federation, or one sentence says what would do."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedflat import Dataset, FedflatError, Samples, federate, train
from fedflat.errors import DataError

pd = pytest.importorskip("pandas")
chance = np.random.default_rng(0)
X, Y = chance.normal(size=(60, 5)).astype("float32"), np.arange(60) % 3
WARDS = np.array(["east", "north", "west"])[np.arange(60) // 20]
TABLE = pd.DataFrame({**{f"x{k}": 10 * X[:, k] + k for k in range(5)}, "sick": Y, "ward": WARDS, "age": Y + 40})


@pytest.fixture
def file(tmp_path):
    TABLE.to_csv(tmp_path / "wards.csv", index=False)
    return tmp_path / "wards.csv"


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_arrays_and_tensors_by_position(kind):
    made = federate(*map(kind, (X, Y, X[:9], Y[:9])), split="iid", clients=4)
    assert made.clients == 4 and torch.equal(made.dataset.train.inputs, torch.from_numpy(X))
    assert torch.equal(made.dataset.test.labels, torch.from_numpy(Y[:9])) and made.dataset.classes == 3
    assert torch.equal(made.batch(torch.arange(2), None)[0], torch.from_numpy(X[:2]))  # numbers stay as they are


def test_without_test_samples_a_share_is_held_out_and_none_is_lost_or_doubled():
    data = federate(X, Y, split="iid", clients=2, test=0.25, seed=3).dataset
    assert (len(data.train), len(data.test)) == (45, 15)
    both = torch.cat([data.train.inputs, data.test.inputs])
    assert sorted(both[:, 0].tolist()) == sorted(X[:, 0].tolist())
    assert torch.equal(federate(X, Y, test=0.25, seed=3).dataset.test.inputs, data.test.inputs)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: DataLoader(d, batch_size=7, shuffle=True)])
def test_a_torch_dataset_or_its_loader(wrap):
    whole = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    made = federate(wrap(whole), "iid", 4, test=TensorDataset(torch.from_numpy(X[:9]), torch.from_numpy(Y[:9])))
    assert torch.equal(made.dataset.train.inputs, torch.from_numpy(X)) and len(made.dataset.test) == 9


def test_pictures_of_a_torch_dataset_are_bytes_with_channels_first():
    image = pytest.importorskip("PIL.Image")
    pixels = chance.integers(0, 256, (6, 4, 3, 3), dtype=np.uint8)
    pictures = [(image.fromarray(each), k % 2) for k, each in enumerate(pixels)]
    made = federate(type("Mine", (), {"__len__": lambda s: 6, "__getitem__": lambda s, k: pictures[k]})(), "iid", 2)
    assert made.dataset.train.inputs.dtype == torch.uint8 and made.dataset.shape == (3, 4, 3)


def test_a_table_and_a_csv_file_with_a_client_column_are_the_same_natural_clients(file):
    options = dict(label="sick", client="ward", columns=[f"x{k}" for k in range(5)])
    table, csv = federate(TABLE, **options), federate(str(file), **options)
    assert table.clients == csv.clients == 3
    for client in range(3):  # in the order of their names
        held = [made.dataset.train.inputs[made.shard(client)] for made in (table, csv)]
        torch.testing.assert_close(*held, rtol=1e-6, atol=0)
        assert set(table.dataset.train.groups[table.shard(client)].tolist()) == {client}
    inputs = table.batch(torch.arange(len(table.dataset.train)), None)[0]
    torch.testing.assert_close(inputs.mean(dim=0), torch.zeros(5), rtol=0, atol=1e-5)  # columns are standardised
    torch.testing.assert_close(inputs.std(dim=0, correction=0), torch.ones(5), rtol=0, atol=1e-5)


def test_the_owners_of_a_table_may_also_be_an_array_and_one_column_a_name():
    made = federate(TABLE, label="sick", client=list(TABLE["ward"]), columns="x0", test=0.2, split="natural")
    assert made.clients == TABLE["ward"].nunique() and made.dataset.train.inputs.shape[1:] == (1,)


def test_texts_as_labels_are_classes_and_floating_labels_are_regressed():
    named = federate(TABLE.drop(columns="sick"), label="ward", split="iid", clients=2).dataset
    assert named.classes == 3 and named.task == "classification"
    real = federate(X, X[:, 0] * 2, split="iid", clients=2)
    assert real.dataset.task == "regression"
    assert train(real, rounds=2, lr=0.01, model_hidden=[4], engine="inline").last("mse") > 0
    several = federate(X, (X > 0).astype("float32"), split="iid", clients=2).dataset
    assert several.task == "multi-label" and several.classes == 5


def test_owners_of_arrays_are_natural_clients_and_index_lists_are_a_split():
    owned = federate(X, Y, X, Y, client=WARDS)
    assert [shard.tolist() for shard in owned.shards] == [list(range(20 * k, 20 * k + 20)) for k in range(3)]
    lists = [[5, 3], [7], [1, 2, 3]]
    for given in (lists, [np.array(each) for each in lists], dict(enumerate(lists))):
        assert [shard.tolist() for shard in federate(X, Y, X, Y, split=given).shards] == [*map(sorted, lists)]


def test_a_split_is_saved_and_read_again(tmp_path):
    made = federate("digits", clients=5)
    made.save(tmp_path / "split.npz")
    again = federate("digits", str(tmp_path / "split.npz"))
    assert all(map(torch.equal, made.shards, again.shards))


def test_one_long_text_does_not_make_all_rows_as_long(tmp_path, monkeypatch):
    """NumPy gives every text of a column the room of the longest: 1 MB on disk would be 26 GB in memory."""
    rows = "".join("a,1\n" for _ in range(50_000))
    (tmp_path / "long.csv").write_text(f"word,y\n{'x' * 131_000},0\n{rows}")
    monkeypatch.setattr("fedflat.federation.sizes.free_memory", lambda: 2**34)
    with pytest.raises(FedflatError, match=r"long.csv unpacks to 26,\d+,\d+,\d+ bytes"):
        federate(str(tmp_path / "long.csv"), clients=2, label="y")


def test_postscript_under_the_name_of_an_image_is_not_run(tmp_path, monkeypatch):
    """Pillow hands it to Ghostscript, by its content and not by its name."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/fuse\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.png").write_text(
            "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 moveto\n%%EOF\n"
        )
    with pytest.raises(FedflatError, match=r"1\.png: is not an image that can be read"):
        federate(str(tmp_path / "data"), clients=2)
    assert not (tmp_path / "fuse").exists()
    with image.open(tmp_path / "data/a/1.png") as picture, suppress(Exception):  # what would have happened
        picture.convert("RGB")
    assert (tmp_path / "fuse").exists()


def test_a_folder_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(count):
                pixels = np.full((6, 5), 40 * k, np.uint8)
                image.fromarray(pixels).save(tmp_path / part / name / f"{k}.png")
    data = federate(str(tmp_path), "iid", 2).dataset
    assert data.shape == (1, 6, 5) and (len(data.train), len(data.test)) == (8, 4)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 and int(data.train.inputs[3].max()) == 120
    assert federate(tmp_path / "train", "iid", 2, image_size=(3, 3)).dataset.shape == (1, 3, 3)
    image.new("L", (9, 9)).save(tmp_path / "train" / "dog" / "z.png")
    with pytest.raises(FedflatError, match=r"z\.png: has 9 × 9 pixels, .* 6 × 5; say image_size="):
        federate(tmp_path, "iid", 2)


def test_token_ids_stay_integers():
    tokens = chance.integers(0, 7, (20, 4))
    made = federate(tokens, Y[:20], split="iid", clients=2, vocabulary=7)
    inputs, _ = made.batch(torch.arange(3), None)
    assert inputs.dtype == torch.int64 and made.dataset.vocabulary == 7


REFUSED = {
    "integers": (lambda: federate(np.ones((9, 2), int), Y[:9]), "int64 of shape .* or token ids with vocabulary="),
    "no labels": (lambda: federate(X), "inputs without labels"),
    "three arrays": (lambda: federate(X, Y, X), "3 values by position; give x_train, y_train, x_test, y_test"),
    "lengths": (lambda: federate(X, Y[:9], X, Y), "60 inputs with 9 labels"),
    "float classes": (lambda: federate(X, Y.astype(float), split="dirichlet"), "not classes; take iid .* integers"),
    "negative": (lambda: federate(X, Y - 1), "labels go from -1 to 1; classes count from 0"),
    "huge label": (lambda: federate(X, Y + 1000), "the label 1002 makes more classes than samples"),
    "no label": (lambda: federate(TABLE), "which column holds the labels"),
    "no column": (lambda: federate(TABLE, label="sik"), "no column 'sik' .*it has x0"),
    "texts": (lambda: federate(TABLE, label="sick"), "column 'ward' holds 'east', which is not a number"),
    "missing": (lambda: federate(TABLE.assign(x1=np.nan), label="sick", client="ward"), "row 1 of column 'x1'"),
    "object": (lambda: federate(object()), "is a object .*; give the name of a data set"),
    "name": (lambda: federate("digit"), "did you mean digits"),
    "path": (lambda: federate("no/such.parquet"), "no data set 'no/such.parquet', and no CSV file"),
    "no file": (lambda: federate("none.csv", label="y"), r"none\.csv is missing"),
    "share": (lambda: federate(X, Y, test=2.0), "test = 2.0: is not a share of 60 samples"),
    "owners": (lambda: federate(X, Y, X, Y, client=WARDS[:5]), "5 owners for 60 samples"),
    "index": (lambda: federate(X, Y, X, Y, split=[[0], [60]]), "client 1 holds the samples 60 to 60"),
    "empty": (lambda: federate(X, Y, X, Y, split=[[0], []]), "client 1"),
    "kind": (lambda: federate(X, Y, X, Y, split=[[0.5], [1]]), "client 0 has a list; give a list of whole numbers"),
    "number": (lambda: federate("digits", 20), "split: is a int; give the name of a split"),
    "sample": (lambda: federate(TensorDataset(torch.zeros(3, 2)), "iid", 2), r"sample 0 .* must give \(input, label\)"),
    "not finite": (lambda: federate(X * np.inf, Y), "not finite"),
    "clients": (lambda: federate("digits", "iid", "five"), "clients = 'five': give a whole number"),
    "half": (lambda: federate("digits", "iid", 2.5), "clients = 2.5: give a whole number"),
    "yes": (lambda: federate("digits", "iid", True), "clients = True: give a whole number"),
    "seed": (lambda: federate("digits", "iid", 2, seed=1.5), "seed = 1.5: give a whole number"),
    "augment": (lambda: federate("digits", "iid", 2, augment="flip"), "augment: is a str; give a fedflat.Augment"),
    "labels": (lambda: federate(TABLE, label=["sick"]), "label= is a list; give the name of one column"),
    "told": (lambda: federate(TABLE, label="sick", columns=["x0", "sick"]), "'sick' holds the labels; leave it out"),
    "nobody": (lambda: federate(TABLE.assign(ward=np.nan), label="sick", client="ward"), "row 1 of column 'ward'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_what_was_given_and_what_would_do(case):
    make, sentence = REFUSED[case]
    with pytest.raises(FedflatError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a,b\n1\n", "row 1 has 1 fields, and 2 columns"), ("a,a\n1,2\n", "name the columns, each once"),
     ("a,b\n", "no rows"), ('a,b\n"1,2\n', "not CSV")],
)  # fmt: skip
def test_a_bad_csv_file_is_told_by_its_row(tmp_path, text, sentence):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(FedflatError, match=sentence):
        federate(str(tmp_path / "bad.csv"), label="a")


def test_what_is_made_says_in_a_line_what_it_is():
    made = federate("digits", "lda", 5, alpha=0.5)
    assert repr(made).startswith("<Federation of digits: 5 clients with ") and repr(made).endswith("lda (alpha 0.5)>")
    assert all(len(repr(each)) < 160 for each in (made, made.dataset, made.dataset.train))
    frame = made.to_frame()
    assert list(frame["samples"]) == [made.samples(i) for i in range(5)] and frame["class 3"].sum() == 147
    assert made._repr_html_().count("<tr>") == 6
    assert len(made.plot().patches) == 50


def test_data_of_hugging_face_and_a_partitioner_of_flower(tmp_path):
    hub = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    table = hub.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist(), "ward": WARDS.tolist()})
    assert federate(table, label="label", client="ward").clients == 3
    table.save_to_disk(str(tmp_path / "saved"))
    assert federate(tmp_path / "saved", "iid", 2, label="label", columns=["x"]).dataset.shape == (5,)
    parts = federate("digits", partitioner.IidPartitioner(4))
    assert parts.clients == 4 and parts.tables()[1] is None


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_targets_of_a_data_set_in_python_are_finite(part, value):
    """Without a word, R² would not be defined, and a label that is missing would be one that a sample does not have."""
    targets = torch.from_numpy(X[:, :2]).clone()
    targets[7, 1] = value
    good, bad = (Samples(torch.from_numpy(X), each) for each in (torch.from_numpy(X[:, :2]), targets))
    parts = (bad, good) if part == "train" else (good, bad)
    with pytest.raises(DataError, match=r"^mine: the labels have values that are missing or not finite$"):
        Dataset("mine", *parts, 2, (), (), task="regression")
