"""Download of official files from their own addresses, only on request and with verified checksums."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from asa.errors import InvalidInputError, UnavailableError
from asa.reading import checksum
from asa.zoo.data.official import Official, Origin

Opener = Callable[..., Any]
"""Function like ``urllib.request.urlopen``: (url, timeout=seconds) -> a readable context manager."""
_TIMEOUT_S = 30.0
"""Longest wait for the network in seconds, not for the whole transfer."""


def _copy(source: Any, target: IO[bytes], origin: Origin) -> None:
    size, digest = 0, hashlib.sha256()
    while block := source.read(1 << 20):
        size += len(block)
        if size > origin.size:
            break
        digest.update(block)
        target.write(block)
    if size != origin.size or digest.hexdigest() != origin.sha256:
        more = "more than " if size > origin.size else ""
        got = f"{more}{min(size, origin.size)} of {origin.size} bytes" if size != origin.size else "the wrong checksum"
        raise InvalidInputError(f"the download of {origin.file} has {got}; it was discarded")


def _get(origin: Origin, directory: Path, opener: Opener) -> None:
    failures: list[str] = []
    for url in origin.urls:
        handle, name = tempfile.mkstemp(dir=directory, prefix=f".{origin.file}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as target, opener(url, timeout=_TIMEOUT_S) as source:
                _copy(source, target, origin)
            os.chmod(name, 0o644)
            os.replace(name, directory / origin.file)
            return
        except InvalidInputError as error:
            failures.append(str(error))
        except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
            failures.append(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}")
        finally:
            Path(name).unlink(missing_ok=True)
    raise UnavailableError(
        f"cannot download {origin.file}: {'; '.join(failures)}; put it into {directory} yourself, or do without it"
    )


def download(what: Official, directory: Path, *, opener: Opener | None = None) -> None:
    """Download the official files of ``what`` into ``directory``. Existing files with the right checksum are kept.

    Raises:
        UnavailableError: no address returned the right bytes, or the directory cannot be written.
    """
    opener = opener or urllib.request.urlopen
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for origin in what.origins:
            path = directory / origin.file
            if not (path.is_file() and path.stat().st_size == origin.size and checksum(path) == origin.sha256):
                _get(origin, directory, opener)
    except OSError as error:
        remedy = "name another folder with --data-root"
        raise UnavailableError(f"cannot write downloads to {directory}: {error.strerror or error}; {remedy}") from None
