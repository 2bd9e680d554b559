"""Readers of common formats: folders of images, tables of CSV, Parquet and Arrow, the Hugging Face hub."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asa.errors import InvalidInputError, UnavailableError, UsageError, lacking
from asa.zoo.data.images import convert
from asa.zoo.hub import reachable
from asa.zoo.inputs import Shape, described, of_tokens

_IMAGES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
_LABELS = ("label", "labels", "class", "target", "fine_label", "y")
"""Names of columns with the class. The first existing one is used; if there is none, the last column."""
_TEXT_SHAPE = (1, 32, 64)
"""Shape of a text if no model requires one: 32 words of 64 features."""
_PICTURES = ("image", "img", "picture")
_TEXTS = ("text", "sentence", "review", "comment", "content")
_TESTS = ("test", "val", "valid", "validation")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Data that was read: inputs [N, ...] and classes [N]. ``test`` is None if the data contains no test part.

    ``scaled`` marks numbers of a table, to be scaled to mean 0 and standard deviation 1.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    description: str
    scaled: bool = False


def folder(path: str, shape: Shape | None) -> Parts:
    """Read images by class: ``DIR/CLASS/*.png``, or ``DIR/train/CLASS/*.png`` with ``DIR/test`` (or ``val``) next to
    it.

    Raises:
        InvalidInputError: no classes, a class without images, or a file that is not an image.
    """
    root = Path(path)
    if not root.is_dir():
        raise InvalidInputError(f"--data folder:{path}: there is no folder {path}")
    named = root / "train"
    tests = [root / name for name in _TESTS if (root / name).is_dir()]
    home = named if named.is_dir() else root
    classes = sorted(p.name for p in home.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(classes) < 2:
        raise InvalidInputError(f"--data folder:{path}: {home} has {len(classes)} folders of classes; 2 are needed")
    train = _of_folder(home, classes, shape)
    test = _of_folder(tests[0], classes, shape) if home is named and tests else None
    return Parts(train=train, test=test, description=f"Images of {len(classes)} classes in {path}")


def _of_folder(home: Path, classes: Sequence[str], shape: Shape | None) -> tuple[Tensor, Tensor]:
    paths, labels = [], []
    for number, name in enumerate(classes):
        files_found = (
            sorted(p for p in (home / name).rglob("*") if p.suffix.lower() in _IMAGES) if (home / name).is_dir() else []
        )
        if not files_found and home.name not in _TESTS:
            raise InvalidInputError(f"{home / name} has no images ({', '.join(sorted(_IMAGES))})")
        paths += files_found
        labels += [number] * len(files_found)
    return pictures(paths, shape, [str(p) for p in paths]), torch.tensor(labels)


def pictures(sources: Sequence[Any], shape: Shape | None, names: Sequence[str]) -> Tensor:
    """Images uint8 [N, C, H, W] from files, bytes or Pillow images, in the model's shape; without one, in that of the
    first image.

    Raises:
        UsageError: the model reads text, or one row of numbers.
        InvalidInputError: one is not an image.
        UnavailableError: they do not fit in memory.
    """
    import psutil
    from PIL import Image, UnidentifiedImageError
    from torchvision.transforms.functional import pil_to_tensor

    images: Tensor | None = None
    for i, (source, name) in enumerate(zip(sources, names, strict=True)):
        try:
            image = source if hasattr(source, "getbands") else Image.open(source)
            tensor = pil_to_tensor(image.convert("L" if shape and shape[0] == 1 else "RGB"))
        except UnidentifiedImageError:
            raise InvalidInputError(f"{name} is not a readable image: its format is unknown") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidInputError(f"{name} is not a readable image: {error}") from None
        height, width = tensor.shape[1:]
        if shape and (of_tokens(shape) or shape[1] == 1 < height):
            advice = f"profile it with --input 3x{height}x{width}"
            raise UsageError(f"{name} is an image, the model takes {described(shape)}; {advice}")
        shape = shape or (tensor.shape[0], height, width)
        if images is None:
            need, free = len(sources) * shape[0] * shape[1] * shape[2], psutil.virtual_memory().available
            if need > free:
                raise UnavailableError(f"{len(sources)} images need {need} bytes in memory, {free} are free")
            images = torch.empty(len(sources), *shape, dtype=torch.uint8)
        images[i] = convert(tensor[None].float(), shape).round().clamp_(0, 255)[0].to(torch.uint8)
    if images is None:
        raise InvalidInputError("no images were found")
    return images


def csv_table(path: str, shape: Shape | None) -> Parts:
    """Read a table with a header. Its inputs are numbers, or a column ``text`` (``sentence``, ``review``). The classes
    are in a column ``label`` (``class``, ``target``), otherwise in the last one.

    Raises:
        InvalidInputError: no such file, rows of different lengths, or text among the numbers.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except UnicodeDecodeError:
        raise InvalidInputError(f"--data csv:{path} is not UTF-8 text; save it as UTF-8") from None
    except (OSError, csv.Error) as error:
        raise InvalidInputError(f"--data csv:{path}: {error}") from None
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise InvalidInputError(f"--data csv:{path} has {len(rows)} rows; a header and samples are needed")
    header = rows[0]
    _check_columns(header, f"csv:{path}")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise InvalidInputError(f"--data csv:{path}: line {number} has {len(row)} columns, not {len(header)}")
    columns: dict[str, Sequence[Any]] = {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}
    return _table(columns, shape, f"csv:{path}")


def parquet(path: str, shape: Shape | None) -> Parts:
    """Read a Parquet file with pyarrow: like :func:`csv_table`, or with a column of images (bytes, as on the hub).

    Raises:
        UnavailableError: pyarrow is missing.
        InvalidInputError: no such table, or one that cannot be used.
    """
    return _columnar("parquet", path, shape)


def arrow(path: str, shape: Shape | None) -> Parts:
    """Read an Arrow file, or a stored stream as written by ``datasets``; like :func:`parquet`."""
    return _columnar("arrow", path, shape)


def _columnar(kind: str, path: str, shape: Shape | None) -> Parts:
    spec = f"{kind}:{path}"
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UnavailableError(lacking(str(error.name), f"--data {spec}")) from None
    try:
        if kind == "parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            with pyarrow.memory_map(path) as file:
                is_file = file.read(6) == b"ARROW1"
                file.seek(0)
                table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file).read_all()
        _check_columns(table.column_names, spec)
        columns = table.to_pydict()
    except (OSError, pyarrow.ArrowException) as error:
        reason = (str(error).splitlines() or ["no table"])[0]
        raise InvalidInputError(f"--data {spec} cannot be read as {kind}: {reason}") from None
    return _table(columns, shape, spec)


def hub(name: str, shape: Shape | None) -> Parts:
    """Read a data set of the Hugging Face hub: its parts ``train`` and ``test`` (or ``validation``).

    Raises:
        UnavailableError: ``datasets`` is missing, or cannot load this one.
        InvalidInputError: no such columns.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UnavailableError(lacking(str(error.name), f"--data hf:{name}")) from None
    is_folder = Path(name).is_dir()
    answers = is_folder or reachable()
    try:
        parts = datasets.load_dataset(name)
    except Exception as error:
        lines = str(error).splitlines()
        if not answers:
            lines = ["it is no folder, not stored on this machine, and the hub does not answer; get it where it does, "
                     "or give a file (parquet:FILE, csv:FILE) or a folder of such files (hf:DIR)"]  # fmt: skip
        raise UnavailableError(f"--data hf:{name}: {lines[0] if lines else type(error).__name__}") from None
    if "train" not in parts:
        raise InvalidInputError(f"--data hf:{name} has {', '.join(parts)}, no part called train")
    test = next((t for t in _TESTS if t in parts), None)
    _check_columns(parts["train"].column_names, f"hf:{name}")
    tables = [
        _table({c: parts[p][c] for c in parts[p].column_names}, shape, f"hf:{name}") for p in ("train", test) if p
    ]
    train, held_out = tables[0], tables[1].train if test else None
    return Parts(train=train.train, test=held_out, description=train.description, scaled=train.scaled)


def _table(columns: dict[str, Sequence[Any]], shape: Shape | None, spec: str) -> Parts:
    """Inputs and classes from columns: a column of images or of text if there is one, otherwise all columns of
    numbers. A column of numbers is one whatever its name."""
    names = list(columns)
    label = next((n for n in _LABELS if n in names), names[-1])
    labels = _classes(columns[label], spec, label)
    others = [n for n in names if n != label]
    picture, written = (
        next((n for n in words if n in others and not _numeric(columns[n])), None) for words in (_PICTURES, _TEXTS)
    )
    unread = [n for n in others if n != (picture or written)]
    aside = f"; not read: {', '.join(unread)}" if unread and (picture or written) else ""
    if picture is not None:
        sources = [_opened(v) for v in columns[picture]]
        shown = [f"{spec}, row {i + 1}" for i in range(len(sources))]
        return Parts(train=(pictures(sources, shape, shown), labels), test=None, description=f"Images of {spec}{aside}")
    if written is not None:
        from asa.zoo.data.text import encoded

        for row, value in enumerate(columns[written], 1):
            if not isinstance(value, str):
                raise InvalidInputError(f"--data {spec}: column {written!r} has {value!r:.40} in row {row}, not text")
        inputs = encoded(columns[written], shape or _TEXT_SHAPE, f"--data {spec}: column {written!r}")
        return Parts(train=(inputs, labels), test=None, description=f"Text of {spec}, classes in {label!r}{aside}")
    numbers = [_numbers(columns[n], spec, n) for n in others]
    return Parts(
        train=(torch.stack(numbers, dim=1), labels), test=None, scaled=True,
        description=f"{len(numbers)} columns of {spec}, classes in {label!r}",
    )  # fmt: skip


def _check_columns(names: Sequence[str], spec: str) -> None:
    """Check that there are inputs besides classes, and no two columns with the same name.

    Raises:
        InvalidInputError: there are not.
    """
    if len(names) < 2:
        state = f"one column, {names[0][:40]!r}" if names else "no columns"
        comma = "; commas separate columns" if spec.startswith("csv:") else ""
        raise InvalidInputError(f"--data {spec} has {state}; inputs and a column of classes are needed{comma}")
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError(f"--data {spec} has {names.count(name)} columns called {name!r}; rename them")


def _opened(value: Any) -> Any:
    """The image in a cell: its bytes, those in a mapping with its path, or the Pillow image itself."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return io.BytesIO(value) if isinstance(value, bytes) else value


def _numbers(values: Iterable[Any], spec: str, name: str) -> Tensor:
    numbers = []
    for row, value in enumerate(values, 1):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"--data {spec}: column {name!r} has {str(value)[:40]!r} in row {row}, not a number; leave the column "
                f"out, make numbers of it, or call it {_TEXTS[0]!r} to have it read as text"
            ) from None
        if number - number != 0:
            raise InvalidInputError(f"--data {spec}: column {name!r} has {number} in row {row}")
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float32)


def _numeric(values: Iterable[Any]) -> bool:
    try:
        return all(not isinstance(v, bytes) and float(v) == float(v) for v in values)
    except (TypeError, ValueError):
        return False


_MISSING = ("", "none", "nan", "null")
"""What tables write where a value is missing."""


def _classes(values: Sequence[Any], spec: str, name: str) -> Tensor:
    """Classes as int64. Whole numbers from 0 are unchanged; anything else is numbered in sorted order."""
    texts = [str(v).strip() for v in values]
    missing = next((i for i, t in enumerate(texts, 1) if t.lower() in _MISSING), None)
    if missing is not None:
        raise InvalidInputError(f"--data {spec}: row {missing} has no class in column {name!r}")
    if all(t.isdecimal() for t in texts):
        return torch.tensor([int(t) for t in texts])
    distinct = {t: i for i, t in enumerate(sorted(set(texts)))}
    if len(distinct) > max(2, len(texts) // 2):
        raise UsageError(
            f"--data {spec}: column {name!r} has {len(distinct)} different values in {len(texts)} rows, which are no "
            f"classes; call the column of classes {_LABELS[0]!r}"
        )
    return torch.tensor([distinct[t] for t in texts])
