"""Reader of images and masks in COCO's format (object detection: polygons and run-length codes),
https://cocodataset.org/#format-data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asa.errors import InvalidInputError
from asa.reading import read_text
from asa.zoo.inputs import Shape

_MOST_BYTES = 2**30
_TESTS = ("val", "test")


def folder(path: str, shape: Shape | None) -> Any:
    """Read ``DIR/annotations/*.json`` with images in ``DIR/train*`` and ``DIR/val*`` (by the file's name), or one
    ``DIR/*.json`` with the images next to it. Where some files are called ``instances*``, captions and key points
    beside them are not read. Class 0 is the background; the others are in the order of the categories' ids. Where
    objects overlap, the later one counts.

    Raises:
        InvalidInputError: there are no such files, or they have another form.
    """
    from asa.zoo.data.readers import Parts

    root, spec = Path(path), f"coco:{path}"
    if not root.is_dir():
        raise InvalidInputError(f"--data {spec}: there is no folder {path}")
    every = sorted(root.glob("annotations/*.json")) or sorted(root.glob("*.json"))
    files = [f for f in every if f.stem.startswith("instances")] or every
    tests = [f for f in files if any(name in f.stem for name in _TESTS)]
    trains = [f for f in files if f not in tests and "train" in f.stem] or [f for f in files if f not in tests]
    if len(trains) != 1 or len(tests) > 1:
        listing = ", ".join(f.name for f in files) or "none"
        raise InvalidInputError(f"--data {spec}: one file of annotations to train on is needed, found: {listing}")
    train, classes, notes = _split(root, trains[0], spec, shape, None)
    test = _split(root, tests[0], spec, shape or tuple(train[0].shape[1:]), classes)[0] if tests else None
    description = f"Images and masks of {len(classes)} categories in {path}{notes}"
    return Parts(train=train, test=test, description=description)


def _split(
    root: Path, file: Path, spec: str, shape: Shape | None, classes: dict[int, int] | None
) -> tuple[tuple[Tensor, Tensor], dict[int, int], str]:
    """Images and masks of one annotation file, the class of every category, and notes that begin with a comma."""
    from asa.zoo.data.readers import pictures

    try:
        document = json.loads(read_text(file, most=_MOST_BYTES))
        images = {int(i["id"]): i for i in document["images"]}
        ids = {int(c["id"]): n for n, c in enumerate(sorted(document["categories"], key=lambda c: int(c["id"])), 1)}
        objects = [(int(a["image_id"]), int(a["category_id"]), a["segmentation"]) for a in document["annotations"]]
        names = {key: str(i["file_name"]) for key, i in images.items()}
        sizes = {key: (int(i["height"]), int(i["width"])) for key, i in images.items()}
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidInputError(f"--data {spec}: {file} is not in COCO's format: {what}") from None
    if not images:
        raise InvalidInputError(f"--data {spec}: {file} names no images")
    classes = classes or ids
    if not objects:
        raise InvalidInputError(f"--data {spec}: {file} has no annotations: every pixel would be background")
    paths = [_image_path(root, file, names[key], spec) for key in images]
    read = pictures(paths, shape, [str(p) for p in paths], more_bytes=8)
    pixels = read.pixels
    for key, path, actual in zip(images, paths, read.sizes, strict=True):
        if actual != sizes[key]:
            (height, width), (h, w) = actual, sizes[key]
            raise InvalidInputError(f"--data {spec}: {path} has {height}x{width} pixels, {file.name} says {h}x{w}")
    masks = torch.zeros(len(images), *pixels.shape[2:], dtype=torch.int64)
    at = {key: i for i, key in enumerate(images)}
    for image, category, segmentation in objects:
        if image not in at or category not in classes:
            what = f"image {image}" if image not in at else f"category {category}"
            raise InvalidInputError(f"--data {spec}: {file} has an annotation of {what}, which it does not list")
        inside = _mask(segmentation, sizes[image], (pixels.shape[2], pixels.shape[3]), f"{spec}, {names[image]}")
        masks[at[image]][inside] = classes[category]
    bare = len(images) - len({image for image, _, _ in objects})
    notes = f", {bare} of {len(images)} images without an object" if bare else ""
    return (pixels, masks), classes, read.changes + notes


def _image_path(root: Path, file: Path, name: str, spec: str) -> Path:
    """Path of an image: next to its annotations, or in a folder with their name (``instances_val2017``: val2017)."""
    for home in (root / file.stem.rpartition("_")[2], root / "images", root, file.parent):
        if (home / name).is_file():
            return home / name
    raise InvalidInputError(f"--data {spec}: {file.name} names {name}, which is not there")


def _mask(segmentation: Any, size: tuple[int, int], to: tuple[int, int], source: str) -> Tensor:
    """Mask from polygons or a run-length code, bool [H, W], resized to ``to``.

    Raises:
        InvalidInputError: it is neither.
    """
    from PIL import Image, ImageDraw

    height, width = size
    image = Image.new("1", (width, height))
    try:
        if isinstance(segmentation, dict):
            counts = segmentation["counts"]
            runs = _counts(counts) if isinstance(counts, str) else [int(c) for c in counts]
            if sum(runs) != height * width or min(runs, default=0) < 0:
                raise ValueError(f"a mask of {sum(runs)} pixels in an image of {height}x{width}")
            bits = torch.repeat_interleave(torch.arange(len(runs)) % 2, torch.tensor(runs)).bool()
            columns = bits.view(width, height).T.contiguous()  # by columns, as COCO counts
            image = Image.fromarray(columns.numpy())
        else:
            for polygon in segmentation:
                points = [float(v) for v in polygon]
                if not all(map(math.isfinite, points)):
                    raise ValueError("a coordinate is not a finite number")
                ImageDraw.Draw(image).polygon(list(zip(points[::2], points[1::2], strict=True)), fill=1)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise InvalidInputError(f"--data {source}: neither polygons nor a run-length code: {error}") from None
    resized = image.resize((to[1], to[0]), Image.Resampling.NEAREST)
    return torch.tensor(list(resized.convert("L").tobytes()), dtype=torch.uint8).view(to) > 0


def _counts(text: str) -> list[int]:
    """Runs of a compressed code: numbers in base 32 as printable characters, from the fourth on as differences
    (pycocotools)."""
    runs: list[int] = []
    at = 0
    while at < len(text):
        value = shift = 0
        more = True
        while more:
            digit = ord(text[at]) - 48
            value |= (digit & 0x1F) << (5 * shift)
            more = bool(digit & 0x20)
            at, shift = at + 1, shift + 1
            if not more and digit & 0x10:
                value |= -1 << (5 * shift)
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs
