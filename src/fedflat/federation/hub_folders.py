"""Local folders of Hugging Face's `datasets`: what `save_to_disk` wrote, or .parquet, .arrow, .jsonl or .json files.

The names of the files say whether they are for training or testing (`train-00000-of-00002.parquet`, `test.jsonl`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedflat.errors import DataError, FedflatError, shortened
from fedflat.federation.text import read_utf8

SAVED = ("dataset_dict.json", "dataset_info.json")
FILES = (".parquet", ".arrow", ".jsonl", ".json")
TESTING = re.compile(r"(^|[-_.])(test|testing|validation|valid|val|dev)([-_.]|$)", re.IGNORECASE)


@contextmanager
def reading_hub(name: str) -> Iterator[None]:
    """Turn whatever `datasets` and pyarrow raise into one sentence."""
    try:
        yield
    except FedflatError:
        raise
    except ImportError as error:
        raise DataError(f"{name}: needs the package {error.name}: pip install 'fedflat[datasets]'") from error
    except Exception as error:  # pyarrow has errors of its own for each kind of damage
        reason = shortened(str(error).partition("\n")[0] or type(error).__name__, 120)
        raise DataError(f"{name}: cannot be read as a Hugging Face data set ({reason})") from error


def holds_tables(folder: Path) -> bool:
    """Return whether a folder holds such data."""
    return folder.is_dir() and (any((folder / name).is_file() for name in SAVED) or bool(_files(folder)))


def _files(folder: Path) -> list[Path]:
    inside = (*folder.iterdir(), *((folder / "data").iterdir() if (folder / "data").is_dir() else ()))
    return sorted(file for file in inside if file.suffix in FILES and file.name not in SAVED and file.is_file())


def opened(folder: Path) -> Any:
    """What a folder holds: a data set, or a dictionary of its parts."""
    import datasets

    if any((folder / name).is_file() for name in SAVED):
        return datasets.load_from_disk(str(folder))
    files = _files(folder)
    if not files:
        raise DataError(
            f"{folder}: holds no data set; there must be {', '.join(FILES)} files, or what save_to_disk wrote"
        )
    parts: dict[str, list[Any]] = {}
    for file in files:
        parts.setdefault("test" if TESTING.search(file.stem) else "train", []).append(_table(file))
    return {name: datasets.concatenate_datasets(tables) for name, tables in parts.items()}


def _table(file: Path) -> Any:
    """A file as a table in memory. No cache is written."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading_hub(str(file)):
        if file.suffix == ".parquet":
            return datasets.Dataset(pq.read_table(file))
        if file.suffix == ".arrow":
            with pa.memory_map(str(file)) as stream:
                return datasets.Dataset(pa.ipc.open_stream(stream).read_all())
        text = read_utf8(file)
        rows = json.loads(text) if file.suffix == ".json" and text.lstrip()[:1] == "[" else _lines(file, text)
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{file}: is not a list of objects")
        return datasets.Dataset.from_list(rows)


def _lines(file: Path, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                raise DataError(f"{file}, line {number}: is not valid JSON") from None
    return rows
