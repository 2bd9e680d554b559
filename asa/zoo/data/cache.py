"""Cache of the embedded default between runs. It is written once in the official format, and checked at every use."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from asa.errors import InvalidInputError
from asa.reading import read_bytes, read_text, user_cache
from asa.zoo.data import cifar, idx
from asa.zoo.data.archive import MAX_UNPACKED_BYTES
from asa.zoo.data.official import Official, Split
from asa.zoo.data.stand_in import RECIPES, VERSION, generate

_SUMS = "SHA256SUMS"


def folder() -> Path:
    """The cache directory of asa's data sets (it need not exist yet)."""
    return user_cache() / "datasets"


def _files(what: Official) -> dict[str, bytes]:
    """The embedded default in the official format, by official file name."""
    splits = dict(zip(("train", "test"), generate(RECIPES[what.name]), strict=True))
    files: dict[str, bytes] = {}
    name: Split
    for name in ("train", "test"):
        images, labels = splits[name]
        names = [n for n, _ in what.files[name]]
        if what.label_bytes == 0:
            files[names[0]], files[names[1]] = idx.encode(images[:, 0]), idx.encode(labels.to(images.dtype))
            continue
        for n, part, of_part in zip(names, images.chunk(len(names)), labels.chunk(len(names)), strict=True):
            files[n] = cifar.encode(part, of_part, of_part // 5 if what.label_bytes == 2 else None)
    return files


def _write(path: Path, data: bytes) -> None:
    """Write atomically, so that another process sees either the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _intact(directory: Path) -> bool:
    """Whether every file exists with the content that was written."""
    try:
        lines = [line.split("  ") for line in read_text(directory / _SUMS).splitlines()]
        return bool(lines) and all(
            hashlib.sha256(read_bytes(directory / name, most=MAX_UNPACKED_BYTES)).hexdigest() == digest
            for digest, name in lines
        )
    except (InvalidInputError, ValueError):
        return False


def _fill(directory: Path, what: Official, files: Callable[[], dict[str, bytes]]) -> None:
    home = directory / what.folder
    if _intact(home):
        return
    home.mkdir(parents=True, exist_ok=True)
    contents = files()
    for name, data in contents.items():
        _write(home / name, data)
    # Written last, so that checksums never exist without files. Two processes at once write the same bytes.
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in contents.items())
    _write(home / _SUMS, sums.encode())


@contextlib.contextmanager
def stand_in(what: Official) -> Iterator[Path]:
    """Context with a directory that is laid out like the official files of ``what`` and contains the embedded default.

    It is in the user's cache, and created there at first use. If that cannot be written, it is a temporary directory,
    which is removed when the context ends.
    """
    directory = folder() / f"stand-in-{VERSION}"
    try:
        _fill(directory, what, lambda: _files(what))
    except OSError:
        with tempfile.TemporaryDirectory(prefix="asa-data-") as name:
            _fill(Path(name), what, lambda: _files(what))
            yield Path(name)
        return
    yield directory
