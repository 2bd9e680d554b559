"""Members of a .tar.gz, read directly into memory: nothing is unpacked to the disk."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Protocol

from asa.errors import InvalidInputError
from asa.reading import open_regular

MAX_UNPACKED_BYTES = 512 * 1024**2
"""Largest number of unpacked bytes: twice the size of the larger official archive. A larger file contains something
else."""


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Read at most ``size`` bytes; returns none at the end."""


class _Bounded:
    """Reads a stream, and raises if more than ``limit`` bytes come out of it."""

    def __init__(self, stream: Readable, limit: int, path: Path) -> None:
        self._stream, self._remaining, self._limit, self._path = stream, limit, limit, path

    def read(self, size: int) -> bytes:
        block = self._stream.read(size)
        self._remaining -= len(block)
        if self._remaining < 0:
            raise InvalidInputError(
                f"{self._path} unpacks to more than {self._limit} bytes; it is not a data set archive"
            )
        return block


def _suspicious(member: tarfile.TarInfo) -> str:
    """Why an entry is not allowed in a data set's archive; empty if it is allowed."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "leads outside the archive"
    if not (member.isdir() or member.isfile()) or member.issparse():
        return "is not a plain file"
    return ""


def _members(tar: tarfile.TarFile, path: Path, names: set[str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for member in tar:
        why = _suspicious(member)
        if why:
            raise InvalidInputError(f"{path} is refused: its entry {member.name!r} {why}")
        name = str(PurePosixPath(member.name))
        if name not in names or member.isdir():
            continue
        if name in contents:
            raise InvalidInputError(f"{path} is refused: it holds {name!r} twice")
        stream = tar.extractfile(member)
        contents[name] = stream.read() if stream is not None else b""
        if len(contents[name]) != member.size:
            raise InvalidInputError(f"{path} is truncated: {name} has {len(contents[name])} of {member.size} bytes")
    return contents


def read_members(path: Path, names: set[str], *, limit: int = MAX_UNPACKED_BYTES) -> dict[str, bytes]:
    """Contents of the members ``names`` of the archive at ``path``, by name. The archive is read to its end, so that
    its checksum is verified.

    Raises:
        InvalidInputError: it is truncated, damaged, larger than ``limit`` bytes when unpacked, without a wanted member,
            or with an entry that leads outside, is a link or a device.
    """
    try:
        with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as unpacked:
            bounded = _Bounded(unpacked, limit, path)
            with tarfile.open(fileobj=bounded, mode="r|") as tar:  # type: ignore[call-overload]
                contents = _members(tar, path, names)
            while bounded.read(1 << 20):
                pass
    except (EOFError, tarfile.TarError, zlib.error, gzip.BadGzipFile) as error:
        size = path.stat().st_size
        raise InvalidInputError(f"{path} ({size} bytes) is truncated or damaged: {str(error).lower()}") from None
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from None
    missing = sorted(names - contents.keys())
    if missing:
        raise InvalidInputError(f"{path} lacks {missing[0]}")
    return contents
