"""CIFAR's binary format: records of one or two label bytes and 3072 pixels (red, green, blue planes, row by row).

Format: the "binary version" section of the data sets' page, https://www.cs.toronto.edu/~kriz/cifar.html. The python
version is a pickle, which can execute code when it is read. It is detected and refused, never opened.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from asa.errors import InvalidInputError
from asa.reading import read_bytes
from asa.zoo.data.archive import MAX_UNPACKED_BYTES, read_members
from asa.zoo.data.official import Official, Split

PIXELS = 3 * 32 * 32

_SMALL = 5
"""Divisor. A file with up to a fifth of the official images counts as a small set made on purpose. One with more, but
not all, counts as truncated."""


def encode(images: Tensor, labels: Tensor, coarse: Tensor | None = None) -> bytes:
    """Encode uint8 ``images`` [N, 3, 32, 32] and ``labels`` [N] as records. For CIFAR-100, ``coarse`` labels come
    before them."""
    columns = [labels.to(torch.uint8)[:, None], images.reshape(len(images), PIXELS)]
    if coarse is not None:
        columns.insert(0, coarse.to(torch.uint8)[:, None])
    return torch.cat(columns, dim=1).numpy().tobytes()


def decode(data: bytes, what: Official, *, source: str, official_count: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] from the content of one file.

    Raises:
        InvalidInputError: not a whole number of records, a number that only a truncated file has, or a label out of
            range; names ``source`` and the bytes.
    """
    record = what.label_bytes + PIXELS
    count, rest = divmod(len(data), record)
    if rest or not count:
        raise InvalidInputError(
            f"{source} is truncated: {len(data)} bytes are not a whole number of {what.title} records of {record} "
            f"bytes; the official file has {official_count * record}"
        )
    if count != official_count and count * _SMALL > official_count:
        raise InvalidInputError(
            f"{source} has {len(data)} bytes ({count} images), the official file has {official_count * record} "
            f"({official_count}); get it again"
        )
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, record)
    limits = (what.num_classes,) if what.label_bytes == 1 else (20, what.num_classes)
    for column, limit in enumerate(limits):
        wrong = int((rows[:, column] >= limit).int().argmax())
        if rows[wrong, column] >= limit:
            raise InvalidInputError(
                f"{source} is not a file of {what.title}: record {wrong} has label {int(rows[wrong, column])}, "
                f"labels go up to {limit - 1}",
                where=f"byte {wrong * record + column}",
            )
    pixels = rows[:, what.label_bytes :].reshape(count, *what.shape).contiguous()
    return pixels, rows[:, what.label_bytes - 1].long()


def _pickled(root: Path, what: Official) -> str:
    """Name of the python version's folder or archive, if it is in ``root``; otherwise empty."""
    plain = "cifar-100-python" if what.name == "cifar100" else "cifar-10-batches-py"
    packed = "cifar-100-python.tar.gz" if what.name == "cifar100" else "cifar-10-python.tar.gz"
    if root.name == plain:
        return plain
    return next((n for n in (plain, packed) if (root / n).exists()), "")


def _contents(root: Path, what: Official, split: Split) -> tuple[dict[str, bytes], str] | None:
    """Content of the split's files by name, and their location; None if ``root`` has none of them."""
    names = [n for n, _ in what.files[split]]
    for folder in (root / what.folder, root):
        present = [n for n in names if (folder / n).is_file()]
        if present and len(present) < len(names):
            missing = next(n for n in names if n not in present)
            raise InvalidInputError(f"{folder} has {present[0]} but lacks {missing}")
        if present:
            return {n: read_bytes(folder / n, most=MAX_UNPACKED_BYTES) for n in names}, str(folder)
    packed = root / what.archive
    if packed.is_file():
        inside = read_members(packed, {f"{what.folder}/{n}" for n in names})
        return {n: inside[f"{what.folder}/{n}"] for n in names}, str(packed)
    return None


def read(root: Path, what: Official, split: Split) -> tuple[Tensor, Tensor, str] | None:
    """Images, labels and the location from which they were read. None if ``root`` contains nothing of the data set.

    ``root`` contains the official folder, or its files, or the official .tar.gz.

    Raises:
        InvalidInputError: files exist but cannot be used (see :func:`decode`), or only the pickled version exists.
    """
    files = _contents(root, what, split)
    if files is None:
        pickled = _pickled(root, what)
        if pickled:
            raise InvalidInputError(
                f"{root} holds {pickled}, the python version of {what.title}, which is a pickle and is not opened; "
                f"put the binary version there: {what.origins[0].urls[0]}"
            )
        return None
    contents, location = files
    parts = [
        decode(contents[name], what, source=f"{location}: {name}", official_count=count)
        for name, count in what.files[split]
    ]
    if len({len(labels) for _, labels in parts}) > 1:
        counts = ", ".join(f"{n} {len(p[1])}" for (n, _), p in zip(what.files[split], parts, strict=True))
        raise InvalidInputError(f"{location}: batches differ in their number of images ({counts}); get them again")
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), location
