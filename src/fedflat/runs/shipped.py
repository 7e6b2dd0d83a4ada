"""Where the files are that come with fedflat beside its code: sweeps, claims and results."""

from __future__ import annotations

from pathlib import Path


def shipped_folder(name: str, checkout: str | None = None) -> Path:
    """Return a folder that comes with fedflat; it may be missing.

    A wheel has it inside the package, a checkout at the top, or there at the path `checkout`.
    """
    package = Path(__file__).parents[1]
    places = package / name, package.parents[1] / (checkout or name)
    return next((place for place in places if place.is_dir()), places[0])
