"""Safe reading of foreign files: regular files only, with a limit on the number of bytes.

A name may lead to a pipe without a writer, to an endless device, or to a folder. Such a file is opened without waiting,
its type is checked, and it is refused before a byte of it is read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import IO, Any

from asa.errors import InvalidInputError

MOST_BYTES = 64 * 1024**2
"""Largest document in bytes: a profile of thousands of components is far smaller."""

_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> IO[Any]:
    """Open the file at ``path`` with ``flags`` of :func:`os.open`, if it is a regular file.

    Raises:
        InvalidInputError: it is something else.
        OSError: it cannot be opened.
    """
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe without a reader
            _check(path, os.stat(path).st_mode)
        raise
    try:
        _check(path, os.fstat(handle).st_mode)
        written = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "ab" if flags & os.O_APPEND else "r+b"
        return os.fdopen(handle, written)
    except BaseException:
        os.close(handle)
        raise


def _check(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise InvalidInputError(f"cannot use {path}: it is {_kind(mode)}, not a regular file")


def user_cache() -> Path:
    """asa's folder in the user's cache. For a user without a home, as a container may have, it is a path at which
    nothing can be written: what would be stored is made again."""
    from platformdirs import user_cache_path

    try:
        path = user_cache_path("asa")
    except RuntimeError:
        return Path(os.devnull) / "asa"
    return path if path.is_absolute() else Path(os.devnull) / "asa"  # older versions of platformdirs


def kind_at(path: Path | str) -> str:
    """What is at ``path``, in words such as "a directory"; empty if there is nothing, or the path is empty."""
    try:
        return _kind(os.stat(path).st_mode)
    except (OSError, ValueError):  # a name with a null character
        return "a link that leads nowhere" if os.path.islink(path) else ""


def _kind(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "something else")


def checksum(path: Path) -> str:
    """SHA-256 of a regular file of any size."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        InvalidInputError: it is missing, unreadable, not a regular file, or larger than ``most`` bytes.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(most + 1) if size <= most else b""
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from None
    if max(size, len(data)) > most:
        raise InvalidInputError(f"{path} holds {max(size, len(data))} bytes, the most is {most}", where="$")
    return data


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """The content of a regular file of UTF-8 text, without the byte-order mark that some editors put before it.

    Raises:
        InvalidInputError: as in :func:`read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path, most=most).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidInputError(f"cannot read {path}: not UTF-8 text") from None
