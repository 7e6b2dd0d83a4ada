"""Data sets of Hugging Face's `datasets` and flwr-datasets' partitioners: what is read is what was written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedflat import Federation, federate, train
from fedflat.errors import DataError, SplitError
from fedflat.federation import load
from fedflat.federation.corpora import Cut
from fedflat.federation.hub_data import hub_dataset, is_hub_data
from fedflat.federation.partitioners import is_partitioner, partitioned

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")
COUNT = 40
CHANCE = np.random.default_rng(0)
NUMBERS, LABELS = CHANCE.normal(size=(COUNT, 2)), CHANCE.integers(0, 3, COUNT)
WARDS = [f"w{i % 4}" for i in range(COUNT)]
PIXELS = CHANCE.integers(0, 255, (COUNT, 8, 6, 3), dtype=np.uint8)


def table(**more):
    columns = {"a": NUMBERS[:, 0], "b": NUMBERS[:, 1], "label": LABELS, "ward": WARDS, **more}
    return datasets.Dataset.from_dict(columns)


def pictures():
    from PIL import Image

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)})
    return datasets.Dataset.from_dict(
        {"image": [Image.fromarray(pixels) for pixels in PIXELS], "label": LABELS.tolist()}, features=features
    )


def both(data, **options):
    """The training and test samples of data whose test part is its end."""
    parts = datasets.DatasetDict(train=data.select(range(30)), test=data.select(range(30, COUNT)))
    return hub_dataset(parts, **options).dataset


def test_columns_of_numbers_are_rows_with_owners():
    found = both(table(), client="ward")
    assert torch.equal(found.train.inputs, torch.tensor(NUMBERS[:30], dtype=torch.float32))
    assert torch.equal(found.test.labels, torch.tensor(LABELS[30:])) and found.classes == 3
    assert found.train.groups.tolist() == [i % 4 for i in range(30)] and found.task == "classification"


def test_images_are_their_pixels():
    found = both(pictures())
    assert torch.equal(found.train.inputs, torch.from_numpy(PIXELS[:30].transpose(0, 3, 1, 2)))
    assert both(pictures(), image_size=(4, 4)).shape == (3, 4, 4)


def test_tokens_are_padded_at_their_end_and_cut_where_the_mask_says():
    rows = [list(range(1, 3 + i % 4)) for i in range(COUNT)]
    plain = datasets.Dataset.from_dict({"input_ids": rows, "label": LABELS})
    masked = datasets.Dataset.from_dict({
        "input_ids": [row + [0] * (5 - len(row)) for row in rows], "label": LABELS,
        "attention_mask": [[1] * len(row) + [0] * (5 - len(row)) for row in rows],
    })  # fmt: skip
    one, other = both(plain), both(masked)
    assert one.vocabulary == 6 and one.train.inputs[0].tolist() == [1, 2, -1, -1, -1]
    assert torch.equal(one.train.inputs, other.train.inputs) and torch.equal(one.test.inputs, other.test.inputs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_every_token_follow_the_mask_on_either_side(side):
    rows = [list(range(1, 3 + i % 4)) for i in range(COUNT)]

    def full(row):
        rest = [0] * (5 - len(row))
        return rest + row if side == "left" else row + rest

    found = both(datasets.Dataset.from_dict({
        "input_ids": [full(row) for row in rows], "attention_mask": [full([1] * len(row)) for row in rows],
        "labels": [full([token % 3 for token in row]) for row in rows],
    }))  # fmt: skip
    assert found.train.inputs[1].tolist() == [1, 2, 3, -1, -1]
    assert found.train.labels[1].tolist() == [1, 2, 0, -100, -100]


@pytest.mark.parametrize("column", ["labels", "attention_mask"])
def test_a_row_with_other_entries_than_tokens_is_named(column):
    rows = {name: [[1, 2]] * COUNT for name in ("input_ids", "labels", "attention_mask")}
    rows[column] = [[1, 2]] * 3 + [[1]] * (COUNT - 3)
    with pytest.raises(DataError, match=f"row 3 has 2 entries in 'input_ids' and 1 in '{column}'"):
        hub_dataset(datasets.Dataset.from_dict(rows), datasets.Dataset.from_dict(rows))


def test_labels_of_every_token_may_be_ignored():
    rows = [list(range(1, 3 + i % 4)) for i in range(COUNT)]
    found = both(datasets.Dataset.from_dict({"input_ids": rows, "labels": [[-100, *row[1:]] for row in rows]}))
    assert found.task == "next-token" and found.train.labels[1].tolist() == [-100, 2, 3, -100, -100]


def test_a_text_is_for_its_label_or_for_its_own_tokens():
    texts = [f"letter number {i}" for i in range(COUNT)]
    labelled = both(datasets.Dataset.from_dict({"text": texts, "label": ["yes", "no"] * 20}), cut=Cut(window=16))
    assert labelled.shape == (16,) and labelled.classes == 2
    own = both(datasets.Dataset.from_dict({"text": texts, "client": WARDS}), cut=Cut(window=8))
    assert own.train.groups.unique().tolist() == [0, 1, 2, 3] and own.classes == own.vocabulary


def test_targets_are_for_regression_and_several_labels_for_all_of_them():
    found = both(datasets.Dataset.from_dict({"x": NUMBERS.tolist(), "y": NUMBERS[:, 0]}))
    assert (found.task, found.shape) == ("regression", (2,))
    many = both(datasets.Dataset.from_dict({"x": NUMBERS.tolist(), "labels": [[i % 2, 1] for i in range(COUNT)]}))
    assert (many.task, many.classes) == ("multi-label", 2)


SEVERAL = [[float(i % 2), 1.0, 0.0] for i in range(COUNT)]
TEXT = {
    "tokens": {"input_ids": [[1, 2, 3, 4, 5][: 1 + i % 5] for i in range(COUNT)]},
    "text": {"text": [f"letter {i}" for i in range(COUNT)]},
}


@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.parametrize(
    ("labels", "task"),
    [(SEVERAL, "multi-label"), ([i / 7 for i in range(COUNT)], "regression"), (NUMBERS.tolist(), "regression")],
)
def test_a_text_can_have_targets_too(kind, labels, task):
    """They are neither padded like the labels of tokens nor taken for names of classes; both parts keep their own."""
    found = both(datasets.Dataset.from_dict({**TEXT[kind], "labels": labels}))
    assert found.task == task and found.labels == ()
    assert found.classes == (len(labels[0]) if isinstance(labels[0], list) else 1)
    for part, rows in ((found.train, slice(30)), (found.test, slice(30, COUNT))):
        torch.testing.assert_close(part.labels, torch.tensor(labels, dtype=torch.float32)[rows])
    if kind == "text":  # where whole numbers cannot be meant for its tokens
        whole = both(datasets.Dataset.from_dict({**TEXT[kind], "labels": [[i % 2, 1] for i in range(COUNT)]}))
        assert (whole.task, whole.classes) == ("multi-label", 2)


def saved(folder: Path, how: str) -> Path:
    train, test = table().select(range(30)), table().select(range(30, COUNT))
    if how == "save_to_disk":
        datasets.DatasetDict(train=train, test=test).save_to_disk(folder)
    elif how == "parquet":
        (folder / "data").mkdir(parents=True)
        train.select(range(20)).to_parquet(folder / "data" / "train-00000-of-00002.parquet")
        train.select(range(20, 30)).to_parquet(folder / "data" / "train-00001-of-00002.parquet")
        test.to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    elif how == "json":
        folder.mkdir()
        (folder / "train.json").write_text(json.dumps(train.to_list()))
        (folder / "validation.json").write_text(json.dumps(test.to_list()))
    else:
        folder.mkdir()
        train.to_json(folder / "train.jsonl")
        test.to_json(folder / "test.jsonl")
    return folder


@pytest.mark.parametrize("how", ["save_to_disk", "parquet", "jsonl", "json"])
def test_a_folder_holds_what_was_saved(tmp_path, how):
    folder = saved(tmp_path / "ours", how)
    assert is_hub_data(folder) and not is_hub_data(tmp_path)
    found, expected = hub_dataset(folder, client="ward").dataset, both(table(), client="ward")
    for one, other in (found.train, expected.train), (found.test, expected.test):
        torch.testing.assert_close(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels) and torch.equal(one.groups, other.groups)


def test_a_folder_is_federated_and_trained(tmp_path):
    folder = saved(tmp_path / "ours", "parquet")
    federation = federate(hub_dataset(folder, client="ward").dataset, "natural", 0)
    assert federation.clients == 4
    result = train(federation, "mlp", rounds=2, batch=8, engine="inline")
    assert 0 <= result.accuracy <= 1


def test_a_recipe_names_the_folder(tmp_path):
    folder = tmp_path / "ours"
    folder.mkdir()
    table().rename_column("ward", "client").to_json(folder / "train.jsonl")
    federation = federate("datasets", "natural", 0, directory=folder)
    assert federation.clients == 4 and federation.dataset.shape == (2,)
    with pytest.raises(DataError, match="needs the path of a folder"):
        federate("datasets")


BROKEN = {
    "train.parquet": b"PAR1 and nothing else",
    "train.arrow": b"not arrow",
    "train.jsonl": b'{"a": 1}\n{"a":',
    "train.json": b"[1, 2]",
    "dataset_dict.json": b"{",
    "dataset_info.json": b"[]",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_folder_is_one_sentence_that_names_it(tmp_path, name):
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(DataError) as refusal:
        hub_dataset(tmp_path)
    assert (name in str(refusal.value) or tmp_path.name in str(refusal.value)) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "options", "sentence"),
    [
        (table, {"label": "nope"}, "there is no column 'nope'; there are a, b, label, ward"),
        (table, {"client": "nope"}, "there is no column 'nope'"),
        (lambda: table().remove_columns("label"), {}, "which column holds the labels?"),
        (lambda: table().to_iterable_dataset(), {}, "a stream; load it without streaming"),
        (lambda: datasets.DatasetDict(other=table()), {}, "there is no part 'train'"),
        (table, {"test": 1.5}, "is not a share of 40 samples"),
        (lambda: table(a=[None, *NUMBERS[1:, 0]]), {"test": table()}, "row 0 has nothing in the column 'a'"),
        (lambda: table().remove_columns(["a", "b"]).remove_columns("ward"), {}, "none of the columns"),
        (lambda: datasets.Dataset.from_dict({"one": ["a"] * 9, "two": ["b"] * 9}), {}, "may all be inputs"),
        (
            lambda: datasets.Dataset.from_dict(
                {"image": [{"bytes": None, "path": "https://a.b/c.png"}] * 9, "label": [0] * 9}
            ).cast_column("image", datasets.Image()),
            {},
            "row 0 has no image of its own",
        ),
    ],
)
def test_data_of_no_use_are_refused(data, options, sentence):
    with pytest.raises(DataError, match=sentence.replace("?", r"\?")):
        hub_dataset(data(), **options)


# Partitioners --------------------------------------------------------------------------------------------------------


def test_partitioners_of_flower_divide_the_rows_as_flower_does():
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    kinds = [
        lambda: partitioner.DirichletPartitioner(4, "label", 1.0, min_partition_size=2),
        lambda: partitioner.PathologicalPartitioner(4, "label", 2),
        lambda: partitioner.NaturalIdPartitioner("ward"),
        lambda: partitioner.LinearPartitioner(4),
    ]
    found = hub_dataset(table(), client="ward")
    for make in kinds:
        theirs, ours = make(), make()
        assert is_partitioner(ours) and not is_partitioner(type(ours))
        theirs.dataset = found.rows
        shards = partitioned(ours, found.dataset, found.rows)
        assert sorted(torch.cat(shards).tolist()) == [*range(32)]
        for number, shard in enumerate(shards):
            rows = theirs.load_partition(number)
            assert sorted(rows["a"]) == pytest.approx(sorted(found.dataset.train.inputs[shard, 0].tolist()), rel=1e-6)


def test_a_partitioner_divides_any_data_by_label():
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    digits = load("digits")
    federation = Federation(digits, partitioned(partitioner.ShardPartitioner(5, "label", 2), digits))
    assert federation.clients == 5 and ((federation.counts() > 0).sum(axis=1) <= 4).all()


def test_partitioners_that_are_of_no_use_are_refused():
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    found = hub_dataset(table(), client="ward")
    used = partitioner.IidPartitioner(3)
    used.dataset = found.rows
    for each, sentence in (
        (partitioner.VerticalEvenPartitioner(2), "VerticalEvenPartitioner: divides columns"),
        (partitioner.IidPartitioner(100), "IidPartitioner: "),
        (partitioner.NaturalIdPartitioner("nope"), "NaturalIdPartitioner: .*nope"),
        (used, "already divides a data set"),
    ):
        with pytest.raises(SplitError, match=sentence):
            partitioned(each, found.dataset, found.rows)
