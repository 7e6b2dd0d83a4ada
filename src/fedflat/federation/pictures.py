"""Image files, in the formats that Pillow decodes by itself.

Pillow detects a format from a file's content and not from its name, so PostScript in a file named .png would be run by
Ghostscript.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fedflat.errors import DataError
from fedflat.files import opened

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")


def check_pillow(path: Path) -> None:
    """Raise a `DataError` if the images of a path cannot be read because Pillow is missing."""
    if find_spec("PIL") is None:
        raise DataError(f"{path} holds images, which need Pillow: pip install 'fedflat[images]'")


@contextmanager
def picture(source: bytes | str | Path) -> Iterator[Image]:
    """Open an image, given as the content or the name of a file. Raises whatever Pillow raises about a damaged one."""
    from PIL import Image

    stream: IO[bytes] = io.BytesIO(source) if isinstance(source, bytes) else opened(source)
    with stream, Image.open(stream, formats=FORMATS) as image:
        yield image
