"""MNIST's idx format, plain or gzipped.

A file has two zero bytes, 8 for unsigned bytes, the number of dimensions, each dimension as a big-endian 32-bit number,
then the values, with the last dimension fastest. Format: "The IDX file format" on the data set's page,
http://yann.lecun.com/exdb/mnist/
"""

from __future__ import annotations

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from asa.errors import InvalidInputError
from asa.reading import open_regular, read_bytes
from asa.zoo.data.official import Official, Split

_LIMIT = 64 * 1024**2
"""Largest file in bytes; the largest official file has 47,040,016."""


def encode(values: Tensor) -> bytes:
    """Encode a uint8 tensor as an idx file."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.contiguous().numpy().tobytes()


def decode(data: bytes, *, dimensions: int, source: str) -> Tensor:
    """A uint8 tensor from the content of an idx file.

    Raises:
        InvalidInputError: not an idx file with that many dimensions, or with another length than its header says.
    """
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise InvalidInputError(f"{source} is truncated: {len(data)} bytes, its header alone has {start}")
    if data[:4] != bytes((0, 0, 8, dimensions)):
        raise InvalidInputError(
            f"{source} is not an idx file of bytes in {dimensions} dimensions: it begins with {data[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    expected = start + prod(shape)
    if len(data) != expected:
        state = "is truncated" if len(data) < expected else "is too long"
        raise InvalidInputError(f"{source} {state}: {len(data)} bytes, its header asks for {expected}")
    if not prod(shape):
        raise InvalidInputError(f"{source} is empty: its header states {'x'.join(map(str, shape))}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)


def _load(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return read_bytes(path, most=_LIMIT)
        with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as stream:
            data = stream.read(_LIMIT + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInputError(
            f"{path} ({path.stat().st_size} bytes) is truncated or damaged: {str(error).lower()}"
        ) from None
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > _LIMIT:
        raise InvalidInputError(f"{path} holds more than {_LIMIT} bytes; it is not an MNIST file")
    return data


def _find(root: Path, name: str) -> Path | None:
    # The official names, those of older mirrors, and the folders in which other libraries store them.
    spellings = [n + end for n in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    folders = [root, root / "mnist", root / "MNIST" / "raw", root / "MNIST"]
    return next((f / n for f in folders for n in spellings if (f / n).is_file()), None)


def read(root: Path, what: Official, split: Split) -> tuple[Tensor, Tensor, str] | None:
    """Images uint8 [N, 1, 28, 28], labels int64 [N] and their location. None if ``root`` contains nothing of the set.

    Raises:
        InvalidInputError: files exist but cannot be used; names the file and the bytes.
    """
    (image_name, official_count), (label_name, _) = what.files[split]
    image_path, label_path = _find(root, image_name), _find(root, label_name)
    if image_path is None and label_path is None:
        return None
    if image_path is None or label_path is None:
        missing = image_name if image_path is None else label_name
        raise InvalidInputError(f"{root} has {(image_path or label_path)} but lacks {missing}(.gz)")  # type: ignore[str-bytes-safe]
    images = decode(_load(image_path), dimensions=3, source=str(image_path))
    labels = decode(_load(label_path), dimensions=1, source=str(label_path))
    if tuple(images.shape[1:]) != what.shape[1:]:
        raise InvalidInputError(f"{image_path} has images of {images.shape[1]}x{images.shape[2]}, not 28x28")
    if len(images) != len(labels):
        raise InvalidInputError(f"{image_path} has {len(images)} images, {label_path} {len(labels)} labels")
    if len(images) > official_count:
        raise InvalidInputError(f"{image_path} has {len(images)} images, the official file {official_count}")
    wrong = int((labels >= what.num_classes).int().argmax())
    if labels[wrong] >= what.num_classes:
        raise InvalidInputError(
            f"{label_path} is not a file of {what.title}: label {wrong} is {int(labels[wrong])}, labels go up to "
            f"{what.num_classes - 1}",
            where=f"byte {8 + wrong}",
        )
    return images[:, None], labels.long(), str(image_path.parent)
