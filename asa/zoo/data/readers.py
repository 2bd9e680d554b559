"""Readers of common formats: folders of images, tables of CSV, Parquet and Arrow, the Hugging Face hub."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from asa.errors import InvalidInputError, UnavailableError, UsageError, lacking
from asa.zoo.data.images import converted
from asa.zoo.hub import reachable
from asa.zoo.inputs import Shape, described, of_tokens

_IMAGES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
LABELS = ("label", "labels", "class", "target", "fine_label", "y")
"""Names of columns with the class. The first existing one is used; if there is none, the last column."""
_TEXT_SHAPE = (1, 32, 64)
"""Shape of a text if no model requires one: 32 words of 64 features."""
_PICTURES = ("image", "img", "picture")
_TEXTS = ("text", "sentence", "review", "comment", "content")
_TRAINS = ("train", "training")
_TESTS = ("test", "testing", "val", "valid", "validation")
_ROW_NUMBERS = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Names of columns that pandas writes for the number of a row."""
_MOST_CLASSES = 1000
"""Number of classes that a table may have whatever its number of rows."""
_LONG = 16
"""Number of digits from which a number is surely no class."""
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Data that was read: inputs [N, ...] and classes [N]. ``test`` is None if the data contains no test part.

    ``scaled`` marks numbers of a table, to be scaled to mean 0 and standard deviation 1.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    description: str
    scaled: bool = False


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Images that were read: ``pixels`` uint8 [N, C, H, W]; ``sizes``, the (height, width) of every file; ``changes``,
    what was done to them, in words that begin with a comma, or empty."""

    pixels: Tensor
    sizes: list[tuple[int, int]]
    changes: str


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    shown = list(names)
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED + 1 else ""
    return ", ".join(shown[:_LISTED] if more else shown) + more


def folder(path: str, shape: Shape | None) -> Parts:
    """Read images by class: ``DIR/CLASS/*.png``, or ``DIR/train/CLASS/*.png`` with ``DIR/test`` (or ``val``) next to
    it.

    Raises:
        InvalidInputError: no classes, a class without images, a class that is only in the test part, or a file that is
            not an image.
    """
    root, spec = Path(path), f"folder:{path}"
    if not root.is_dir():
        raise InvalidInputError(f"--data {spec}: there is no folder {path}")
    home = next((root / name for name in _TRAINS if (root / name).is_dir()), root)
    tests = [root / name for name in _TESTS if (root / name).is_dir()]
    if home is root and tests:
        raise InvalidInputError(
            f"--data {spec} has a folder {tests[0].name} and none called train; put the classes to train on into "
            f"{root / 'train'}"
        )
    classes = _folders(home)
    if len(classes) < 2:
        raise InvalidInputError(f"--data {spec}: folders of classes in {home}: {len(classes)}; 2 are needed")
    by_class = [test for test in tests if set(_folders(test)) & set(classes)]
    if tests and not by_class:
        raise InvalidInputError(
            f"--data {spec}: {tests[0]} has no folder of a class ({listed(classes)}); sort its images by class, or "
            "remove it: then a fifth of the others is for testing"
        )
    unread = [f"{test.name}/" for test in tests if test not in by_class[:1]]
    train, changes = _of_folder(home, classes, shape, unread)
    test = None
    if by_class:
        strange = sorted(set(_folders(by_class[0])) - set(classes))
        if strange:
            raise InvalidInputError(f"--data {spec}: {by_class[0]} has the class {strange[0]}, which {home} has not")
        test = _of_folder(by_class[0], classes, shape or tuple(train[0].shape[1:]), unread)[0]
    aside = f"; not read: {listed(unread)}" if unread else ""
    description = f"Images of {len(classes)} classes in {path} ({listed(classes)}){changes}{aside}"
    return Parts(train=train, test=test, description=description)


def _folders(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir() if p.is_dir() and not p.name.startswith("."))


def _of_folder(
    home: Path, classes: Sequence[str], shape: Shape | None, unread: list[str]
) -> tuple[tuple[Tensor, Tensor], str]:
    """Images and classes in ``home``, and what was done to them. Other files are added to ``unread``."""
    paths: list[Path] = []
    labels: list[int] = []
    files = [p for p in sorted(home.iterdir()) if p.is_file()]
    for number, name in enumerate(classes):
        inside = sorted(p for p in (home / name).rglob("*") if p.is_file())
        images = [p for p in inside if p.suffix.lower() in _IMAGES and not p.name.startswith(".")]
        if not images and home.name not in _TESTS:
            raise InvalidInputError(f"{home / name} has no images ({', '.join(sorted(_IMAGES))})")
        files += [p for p in inside if p not in set(images)]
        paths += images
        labels += [number] * len(images)
    unread += [str(p.relative_to(home)) for p in files if not p.name.startswith(".")]
    read = pictures(paths, shape, [str(p) for p in paths])
    return (read.pixels, torch.tensor(labels)), read.changes


def pictures(sources: Sequence[Any], shape: Shape | None, names: Sequence[str], *, more_bytes: int = 0) -> Pictures:
    """Images from files, bytes or Pillow images, in the model's shape; without one, in that of the first image.

    Args:
        names: of the images, for errors.
        more_bytes: memory that is needed for every pixel of a channel besides, in bytes.

    Raises:
        UsageError: the model reads text, one row of numbers, or other channels.
        InvalidInputError: one is not an image.
        UnavailableError: they do not fit in memory.
    """
    import psutil

    images: Tensor | None = None
    sizes: list[tuple[int, int]] = []
    modes: set[str] = set()
    for i, (source, name) in enumerate(zip(sources, names, strict=True)):
        tensor, mode = _pixels(source, name, grey=bool(shape) and shape is not None and shape[0] == 1)
        height, width = tensor.shape[1:]
        if shape and (of_tokens(shape) or shape[1] == 1 < height):
            advice = f"profile it with --input 3x{height}x{width}"
            raise UsageError(f"{name} is an image, the model takes {described(shape)}; {advice}")
        shape = shape or (tensor.shape[0], height, width)
        if tensor.shape[0] != shape[0]:
            raise UsageError(
                f"{name} has {tensor.shape[0]} channels, the model takes {shape[0]}; profile it with --input "
                f"3x{shape[1]}x{shape[2]} or 1x{shape[1]}x{shape[2]}"
            )
        if images is None:
            need = len(sources) * (shape[0] + more_bytes) * shape[1] * shape[2]
            free = psutil.virtual_memory().available
            if need > free:
                raise UnavailableError(f"{len(sources)} images need {need} bytes in memory, {free} are free")
            images = torch.empty(len(sources), *shape, dtype=torch.uint8)
        sizes.append((height, width))
        modes.add(mode)
        images[i] = converted(tensor[None], shape)[0]
    if images is None or shape is None:
        raise InvalidInputError("no images were found")
    return Pictures(pixels=images, sizes=sizes, changes=_changes(shape, sizes, modes))


def _changes(shape: Shape, sizes: Sequence[tuple[int, int]], modes: set[str]) -> str:
    """What :func:`pictures` did to images, in words that begin with a comma."""
    changes = ""
    different = sorted(set(sizes))
    if different != [tuple(shape[1:])]:
        texts = [f"{height}x{width}" for height, width in (different[0], different[-1])]
        origin = texts[0] if len(different) == 1 else f"{len(different)} sizes ({texts[0]} to {texts[1]})"
        changes += f", resized from {origin} to {shape[1]}x{shape[2]}"
    grey = {mode for mode in modes if mode in ("1", "L", "LA") or mode.startswith("I")}
    if shape[0] == 1 and modes - grey:
        changes += ", colours weighted to grey"
    if shape[0] == 3 and grey:
        changes += ", grey repeated over 3 channels"
    return changes


def _pixels(source: Any, name: str, *, grey: bool) -> tuple[Tensor, str]:
    """An image as uint8 [C, H, W], with one channel if ``grey``, otherwise three; and its mode in Pillow.

    Raises:
        InvalidInputError: it is not an image of 8 or 16 bits.
    """
    import numpy as np
    from PIL import Image, UnidentifiedImageError
    from torchvision.transforms.functional import pil_to_tensor

    if source is None:
        raise InvalidInputError(f"{name} has no image")
    try:
        with source if hasattr(source, "getbands") else Image.open(source) as image:
            mode, shown = image.mode, image
            if mode.startswith("I"):  # Pillow would cut 16 bits off at 255
                values = np.asarray(image).astype(np.int64)
                if values.size and not 0 <= values.min() <= values.max() < 2**16:
                    raise ValueError(f"its values are {values.min()} to {values.max()}, not 8 or 16 bits")
                shown = Image.fromarray((values >> 8).astype(np.uint8))
            elif mode == "F":
                raise ValueError("its pixels are floating numbers; save it with 8 or 16 bits")
            return pil_to_tensor(shown.convert("L" if grey else "RGB")), mode
    except UnidentifiedImageError:
        raise InvalidInputError(f"{name} is not a readable image: its format is unknown") from None
    except Exception as error:  # whatever a decoder raises for damaged bytes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidInputError(f"{name} is not a readable image: {reason}") from None


def _is_packed(path: str | Path) -> bool:
    """Whether a file is compressed, by its first bytes: gzip, zip, bzip2, xz or zstd."""
    with open(path, "rb") as file:
        return file.read(6).startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))


def csv_table(path: str, shape: Shape | None) -> Parts:
    """Read a table with a header. Its inputs are numbers, or a column ``text`` (``sentence``, ``review``). The classes
    are in a column ``label`` (``class``, ``target``), otherwise in the last one.

    Raises:
        InvalidInputError: no such file, rows of different lengths, or text among the numbers.
    """
    csv.field_size_limit(sys.maxsize)  # a text may be long
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError:
        what = "is compressed; unpack it first" if _is_packed(path) else "is not UTF-8 text; save it as UTF-8"
        raise InvalidInputError(f"--data csv:{path} {what}") from None
    except (OSError, csv.Error) as error:
        raise InvalidInputError(f"--data csv:{path}: {error}") from None
    if len(lines) < 2:
        raise InvalidInputError(f"--data csv:{path} has {len(lines)} rows; a header and samples are needed")
    header = [name.strip() for name in lines[0][1]]
    if _numeric(header):
        raise InvalidInputError(
            f"--data csv:{path} begins with numbers ({listed(header)}); its first line must name the columns"
        )
    _check_columns(header, f"csv:{path}")
    for number, row in lines[1:]:
        if len(row) != len(header):
            raise InvalidInputError(f"--data csv:{path}: line {number} has {len(row)} columns, not {len(header)}")
    columns: dict[str, Sequence[Any]] = {name: [row[i] for _, row in lines[1:]] for i, name in enumerate(header)}
    return _table([columns], shape, f"csv:{path}")


def columnar(kind: Literal["parquet", "arrow"], path: str, shape: Shape | None) -> Parts:
    """Read a Parquet file, or an Arrow file or stored stream as written by ``datasets``, with pyarrow: like
    :func:`csv_table`, or with a column of images (bytes, as on the hub).

    Raises:
        UnavailableError: pyarrow is missing.
        InvalidInputError: no such table, or one that cannot be used.
    """
    spec = f"{kind}:{path}"
    if not Path(path).exists():
        raise InvalidInputError(f"--data {spec}: there is no {path}")
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
    except InvalidInputError:
        raise
    except Exception as error:  # pyarrow's own, and those of values that Python cannot hold
        reason = (str(error).splitlines() or ["no table"])[0]
        raise InvalidInputError(f"--data {spec} cannot be read as {kind}: {reason}") from None
    return _table([columns], shape, spec)


_SAVED = ("dataset_dict.json", "state.json")
"""Files in a folder that ``save_to_disk`` of the package ``datasets`` has written: of several parts, or of one."""


def hub(name: str, shape: Shape | None) -> Parts:
    """Read a data set of the Hugging Face hub, or one that ``save_to_disk`` wrote to a folder: its parts ``train`` and
    ``test`` (or ``validation``).

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
        saved = any((Path(name) / file).is_file() for file in _SAVED)
        parts = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:
        lines = str(error).splitlines()
        if not answers:
            lines = ["it is no folder, not stored on this machine, and the hub does not answer; get it where it does, "
                     "or give a file (parquet:FILE, csv:FILE) or a folder of such files (hf:DIR)"]  # fmt: skip
        raise UnavailableError(f"--data hf:{name}: {lines[0] if lines else type(error).__name__}") from None
    if not isinstance(parts, dict):
        parts = {"train": parts}
    if "train" not in parts:
        raise InvalidInputError(f"--data hf:{name} has {', '.join(parts)}, no part called train")
    names = list(parts["train"].column_names)
    _check_columns(names, f"hf:{name}")
    label = _label(names)
    test = next((t for t in _TESTS if t in parts and not _unlabelled(parts[t], label)), None)
    lacks = [c for c in names if test and c not in parts[test].column_names]
    if lacks:
        raise InvalidInputError(f"--data hf:{name}: its part {test} has no column {lacks[0]!r}, which train has")
    tables = [{c: parts[p][c] for c in names} for p in ("train", test) if p]
    return _table(tables, shape, f"hf:{name}", unread=[p for p in parts if p not in ("train", test)])


def _unlabelled(part: Any, label: str) -> bool:
    """Whether a part of a data set has no classes: test parts of the hub often have -1 for each."""
    return label not in part.column_names or all(str(value) == "-1" for value in part[label])


def _label(names: Sequence[str]) -> str:
    """The column of classes: the first with a usual name, or the last one."""
    usual = {name.strip().lower(): name for name in reversed(names)}
    return next((usual[n] for n in LABELS if n in usual), names[-1])


def _table(
    parts: Sequence[Mapping[str, Sequence[Any]]], shape: Shape | None, spec: str, *, unread: Sequence[str] = ()
) -> Parts:
    """Inputs and classes from the columns of a table to train on, and of one for testing if there are two: a column of
    images or of text if there is one, otherwise all columns of numbers. A column of numbers is one whatever its name.

    Args:
        unread: what else was not read, for the description.
    """
    names = [n for n in parts[0] if not _ROW_NUMBERS.fullmatch(n)]
    numbered = [n or "a column without a name" for n in parts[0] if n not in names]
    label = _label(names) if names else ""
    others = [n for n in names if n != label]
    if not others:
        raise InvalidInputError(f"--data {spec} has no column of inputs besides the classes in {label!r}")
    labels, classes = _classes([part[label] for part in parts], spec, label)
    picture, written = (
        next((n for n in others if n.strip().lower() in words and not _numeric(parts[0][n])), None)
        for words in (_PICTURES, _TEXTS)
    )
    used = [n for n in (picture or written,) if n] or others
    aside = [*numbered, *(n for n in others if n not in used), *unread]
    inputs, kind, changes = [], "", ""
    for part in parts:
        if picture is not None:
            sources = [_opened(v) for v in part[picture]]
            read = pictures(sources, shape, [f"--data {spec}: row {i + 1}" for i in range(len(sources))])
            shape = shape or tuple(read.pixels.shape[1:])
            inputs.append(read.pixels)
            kind, changes = "Images", changes or read.changes
        elif written is not None:
            from asa.zoo.data.text import cut, encoded

            for row, value in enumerate(part[written], 1):
                if not isinstance(value, str):
                    raise InvalidInputError(
                        f"--data {spec}: column {written!r} has {value!r:.40} in row {row}, not text"
                    )
            if len(part[written]) and not any(map(str.strip, part[written])):
                raise InvalidInputError(f"--data {spec}: column {written!r} is empty in every row")
            shape = shape or _TEXT_SHAPE
            inputs.append(encoded(part[written], shape, f"--data {spec}: column {written!r}"))
            kind, changes = "Text", changes or cut(part[written], shape)
        else:
            inputs.append(torch.stack([_numbers(part[n], spec, n) for n in others], dim=1))
            kind = f"{len(others)} column{'s' * (len(others) != 1)} ({listed(others)})"
    return Parts(
        train=(inputs[0], labels[0]), test=(inputs[1], labels[1]) if len(parts) > 1 else None,
        description=f"{kind} of {spec}, classes in {label!r}{classes}{changes}"
        + (f"; not read: {listed(aside)}" if aside else ""),
        scaled=picture is None and written is None,
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
        except (TypeError, ValueError, OverflowError):
            raise InvalidInputError(
                f"--data {spec}: column {name!r} has {str(value)[:40]!r} in row {row}, not a number; leave the column "
                f"out, make numbers of it, or call it {_TEXTS[0]!r} to have it read as text"
            ) from None
        if number - number != 0:
            raise InvalidInputError(f"--data {spec}: column {name!r} has {number} in row {row}")
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float64)


def _numeric(values: Iterable[Any]) -> bool:
    try:
        return all(not isinstance(v, bytes) and float(v) == float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        return False


_MISSING = ("", "none", "nan", "null")
"""What tables write where a value is missing."""


def _classes(parts: Sequence[Sequence[Any]], spec: str, name: str) -> tuple[list[Tensor], str]:
    """Classes of every part as int64, and how they were numbered, in words. Whole numbers from 0 are unchanged;
    anything else is numbered in sorted order, alike in all parts.

    Raises:
        InvalidInputError: one is missing or below 0.
        UsageError: the values are no classes.
    """
    texts = [[_written(value) for value in part] for part in parts]
    for part in texts:
        missing = next((i for i, t in enumerate(part, 1) if t.lower() in _MISSING), None)
        if missing is not None:
            raise InvalidInputError(f"--data {spec}: row {missing} has no class in column {name!r}")
    rows, distinct = sum(map(len, texts)), {t for part in texts for t in part}
    remedy = f"call the column of classes {LABELS[0]!r}"
    if name.strip().lower() in LABELS:
        remedy = "to learn a quantity, divide it into classes"
    if all(t.removeprefix("-").isdecimal() for t in distinct) and distinct != {"-1", "1"}:
        longest = max(distinct, key=len, default="0")
        extremes = [int(t) for t in distinct] if len(longest) < _LONG else []
        if extremes and min(extremes) < 0:
            raise InvalidInputError(
                f"--data {spec}: column {name!r} has class {min(extremes)}; classes are numbered from 0"
            )
        if len(longest) >= _LONG or max(extremes, default=0) >= max(_MOST_CLASSES, rows):
            high = max(extremes) if extremes else f"{longest[:_LONG]}..."
            raise UsageError(
                f"--data {spec}: column {name!r} has numbers up to {high} in {rows} rows; classes are numbered from 0 "
                f"without gaps, or have names; {remedy}"
            )
        return [torch.tensor([int(t) for t in part], dtype=torch.int64) for part in texts], ""
    if len(distinct) > max(2, rows // 2):
        raise UsageError(
            f"--data {spec}: column {name!r} has {len(distinct)} different values in {rows} rows, which are no "
            f"classes; {remedy}"
        )
    numbers = {t: i for i, t in enumerate(sorted(distinct))}
    return [torch.tensor([numbers[t] for t in part]) for part in texts], f" ({listed(numbers)})"


def _written(value: Any) -> str:
    """A class as text; a whole number without its fraction, because a column with 1.0 holds class 1."""
    text = str(value).strip()
    return text.removesuffix(".0") if text.removeprefix("-").removesuffix(".0").isdecimal() else text
