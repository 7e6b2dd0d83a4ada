"""Folders of images: `class/file.png`, optionally below `train` and `test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError
from fedflat.federation.pictures import check_pillow, picture
from fedflat.federation.sizes import MOST, check_size
from fedflat.progress import track

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
PARTS = {"train": ("train", "training"), "test": ("test", "testing", "val", "valid", "validation")}


class Folder(NamedTuple):
    """Images and the names of their classes, for training and optionally for testing."""

    train: tuple[NDArray[np.uint8], NDArray[Any]]
    test: tuple[NDArray[np.uint8], NDArray[Any]] | None


def image_folder(path: Path, size: tuple[int, int] | None = None) -> Folder:
    """Read a folder of images.

    Args:
        path: a folder with a folder of images for each class, or with such folders below `train` and `test`.
        size: height and width to which all images are resized; without it they must have the same.

    Raises:
        DataError: there are no images, or one cannot be read or has another size.
    """
    inside = {part: next((path / n for n in names if (path / n).is_dir()), None) for part, names in PARTS.items()}
    if inside["train"] is None or inside["test"] is None:
        return Folder(_read(path, size), None)
    return Folder(_read(inside["train"], size), _read(inside["test"], size))


def _read(path: Path, size: tuple[int, int] | None) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    check_pillow(path)
    classes = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    files = [f for c in classes for f in sorted(c.rglob("*")) if f.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"{path}: no images; there must be a folder for each class, with {', '.join(SUFFIXES)} files")
    pictures, grey = list[NDArray[np.uint8]](), True
    for file in track(files, "reading"):
        try:
            with picture(file) as image:
                if size is None and pictures and pictures[0].shape[:2] != (image.height, image.width):
                    was = f"{pictures[0].shape[0]} × {pictures[0].shape[1]}"
                    raise DataError(
                        f"{file}: has {image.height} × {image.width} pixels, and the images before it {was}; "
                        "say image_size=(height, width)"
                    )
                shape = size or (image.height, image.width)
                check_size(file, 3 * shape[0] * shape[1] * len(files), MOST)
                grey = grey and image.mode in ("L", "1")
                plain = image.convert("RGB")
                pictures.append(np.asarray(plain.resize((shape[1], shape[0])) if size else plain, np.uint8))
        except DataError:
            raise
        except Exception as error:  # Pillow raises SyntaxError and struct.error too
            raise DataError(f"{file}: is not an image that can be read ({error})") from error
    images = np.stack(pictures).transpose(0, 3, 1, 2)
    owner = np.array([file.relative_to(path).parts[0] for file in files])
    return np.ascontiguousarray(images[:, :1] if grey else images), owner
