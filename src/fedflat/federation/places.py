"""Where data sets are on this machine."""

import os
from pathlib import Path

from platformdirs import user_cache_dir

from fedflat.errors import DataError


def data_directory(directory: Path | str | None = None) -> Path:
    """The data directory: the argument, else the environment variable FEDFLAT_DATA, else the user's cache folder."""
    return expanded(directory or os.environ.get("FEDFLAT_DATA") or user_cache_dir("fedflat"))


def own_path(directory: Path | None, name: str, what: str) -> Path:
    """The path of a user's own data.

    Raises:
        DataError: the recipe does not give it.
    """
    if directory is None:
        raise DataError(f"the data set {name} needs the path of {what}: data.dir")
    return directory


def expanded(place: Path | str) -> Path:
    """The path with the user's home in place of `~`; that of an unknown user stays, and is missing like another."""
    return Path(os.path.expanduser(place))
