"""Files from untrusted sources: only regular files are read, and nothing is written through a link."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path

from fedflat.errors import RunError

# Opening a pipe or a device must not block until its other end is opened. Windows has neither flag.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def opened(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; a pipe or device in its place is an error instead of an endless wait.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return os.fdopen(_regular(path, os.O_RDONLY | _AT_ONCE), "rb")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file if it fits into memory. A sparse file can be much larger than its space on disk.

    Raises:
        OSError: it cannot be read, is not a regular file, or is too large.
    """
    with opened(path) as file:
        return read_rest(file)


def read_rest(file: BufferedReader) -> bytes:
    """Read the rest of an open file, if it fits into memory."""
    size, free = os.fstat(file.fileno()).st_size - file.tell(), free_memory()
    if free is not None and size > free:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than there is memory", file.name)
    return file.read()


def changeable(path: str | os.PathLike[str]) -> FileIO:
    """Open a private file for reading and writing, without a buffer; it is created if it does not exist.

    Raises:
        OSError: it cannot be opened, or is a link, pipe or device. A link in an untrusted directory could point to
            any other file.
    """
    try:
        return FileIO(_regular(path, os.O_RDWR | os.O_CREAT | _NO_LINK | _AT_ONCE), "r+b")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{Path(path).name} is a symbolic link", str(path)) from None
        raise


def _regular(path: str | os.PathLike[str], flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{Path(path).name} is not a regular file", str(path))


def free_memory() -> int | None:
    """Return the available memory in bytes, or None if the system does not report it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


@contextmanager
def written_to(path: Path, advice: str) -> Iterator[None]:
    """Turn a disk error (full, broken, no permission) into one sentence.

    Args:
        path: the path to mention.
        advice: what to do about it, the end of the sentence.

    Raises:
        RunError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); {advice}") from None


def private_directory(path: Path) -> None:
    """Create a directory that only its owner can read; an existing one stays unchanged."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_to_others(path: Path) -> str:
    """Return how other users of the machine could replace or read a private file; empty if they cannot.

    The file is private if nobody else can write to its directory or to one above it (unless that is sticky, as /tmp
    is), and if the file itself, where it exists, belongs to this user and is closed to others.
    """
    if sys.platform == "win32":
        return ""
    folder = path.parent.resolve()
    for place in (folder, *folder.parents):
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and (place == folder or not mode & stat.S_ISVTX):
            return f"every user of this machine may write to {place}; chmod o-w"
    if not path.exists():
        return ""
    found = path.stat()
    if os.geteuid() and found.st_uid not in (0, os.geteuid()):
        return f"{path.name} belongs to another user of this machine"
    return f"every user of this machine may open {path.name}; chmod 600" if found.st_mode & stat.S_IRWXO else ""


def write_whole(path: Path, content: bytes, public: bool = False) -> None:
    """Write a file atomically, safe against power loss: write aside, sync, rename.

    The file aside is always new: an existing link of its name is removed and not followed.

    Args:
        path: the file.
        content: its new content.
        public: whether other users may read it; otherwise only its owner can.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)  # left by a killed process, or put there by another user
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0)
    descriptor = os.open(aside, new, 0o666 if public else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_whole(path: Path) -> bytes:
    """Read a file of a run.

    Raises:
        RunError: if it cannot be read.
    """
    try:
        return read_bytes(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names of its files are on disk."""
    if sys.platform == "win32":
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
