"""Opens a data set by name: the official files if there are any, otherwise the embedded default if no folder was
given."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from asa.errors import InvalidInputError, UsageError
from asa.zoo import specs
from asa.zoo.data import cache, cifar, digits, idx, shapes, text
from asa.zoo.data.download import Opener, download
from asa.zoo.data.images import ImageSet, reshaped
from asa.zoo.data.language import TokenSet, language
from asa.zoo.data.official import CIFAR100, OFFICIAL, Official, Split
from asa.zoo.inputs import Shape, of_tokens

NAMES = specs.NAMED

_STAND_INS = ("cifar100", "synthetic")
"""Names for which a model of tokens gets the synthetic language: the default data set, and ``synthetic``."""


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 [N, C, H, W], for pixels scaled to 0..1."""
    pixels = images.double().div_(255)
    return tuple(pixels.mean(dim=(0, 2, 3)).tolist()), tuple(pixels.std(dim=(0, 2, 3)).tolist())


def _read(root: Path, what: Official, split: Split) -> tuple[Tensor, Tensor, str] | None:
    return (cifar.read if what.label_bytes else idx.read)(root, what, split)


def _from_files(root: Path, what: Official, split: Split) -> ImageSet | None:
    contents = _read(root, what, split)
    if contents is None:
        return None
    images, labels, location = contents
    official = sum(count for _, count in what.files[split][: 1 if what.label_bytes == 0 else None])
    note = "" if len(labels) == official else f" (the official set has {official})"
    source = f"{what.title}, {split}: {len(labels)} images{note} from {location}."
    return _images(what, images, labels, what.mean, what.std, what.name, source)


def _images(
    what: Official, images: Tensor, labels: Tensor, mean: tuple[float, ...], std: tuple[float, ...], name: str,
    source: str,
) -> ImageSet:  # fmt: skip
    """Images and labels in the format of ``what``."""
    return ImageSet(
        images=images, labels=labels, num_classes=what.num_classes, mean=mean, std=std, name=name, source=source,
        shape=what.shape, flips=what.flips,
    )  # fmt: skip


_stand_ins: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
"""Statistics of the training images, by data set."""


def _stand_in(what: Official, split: Split, name: str) -> ImageSet:
    with cache.stand_in(what) as root:
        contents = _read(root, what, split)
        if what.name not in _stand_ins:  # the bytes never change
            train = contents if split == "train" else _read(root, what, "train")
            assert train is not None
            _stand_ins[what.name] = _statistics(train[0])
    assert contents is not None
    images, labels, _ = contents
    mean, std = _stand_ins[what.name]
    origin = "asked for by name" if name == "synthetic" else "no --data-root was given"
    source = (
        f"Made-up images in {what.title}'s format, {split}: {len(labels)} of {what.num_classes} classes "
        f"({origin}); they can be learned, but say nothing about {what.title}."
    )
    return _images(what, images, labels, mean, std, name, source)


def _digits(split: Split) -> ImageSet:
    images, labels = digits.read(split)
    mean, std = _statistics(digits.read("train")[0])
    return ImageSet(
        images=images,
        labels=labels,
        num_classes=10,
        mean=mean,
        std=std,
        name="digits",
        source=f"Handwritten digits of the UCI repository, {split}: {len(labels)} of 1797 images.",
        shape=(1, 8, 8),
        flips=False,
    )


def _shapes(split: Split, shape: Shape) -> ImageSet:
    images, labels = shapes.scenes(split, shape)
    mean, std = _statistics(images if split == "train" else shapes.scenes("train", shape)[0])
    return ImageSet(
        images=images, labels=labels, num_classes=shapes.CLASSES, mean=mean, std=std, name="shapes", shape=shape,
        source=f"Made-up scenes to segment, {split}: {len(images)} of squares, discs and crosses.",
    )  # fmt: skip


def _sentiment(split: Split, shape: Shape | None) -> ImageSet:
    texts, labels = text.reviews(split)
    inputs = text.encoded(texts, shape or (1, 16, 64), "--data sentiment")
    source = (
        f"Made-up reviews, {split}: {len(texts)}, favourable or not; they can be learned, but say nothing of any text."
    )
    if inputs.dim() == 2:
        return TokenSet(
            images=inputs, labels=labels, num_classes=2, name="sentiment", source=source, shape=(inputs.shape[1],)
        )
    channels = inputs.shape[1]
    return ImageSet(
        images=inputs, labels=labels, num_classes=2, mean=(0.0,) * channels, std=(1.0,) * channels, name="sentiment",
        source=source, shape=tuple(inputs.shape[1:]), flips=False,
    )  # fmt: skip


def _official(what: Official, split: Split, root: Path | None, fetch_it: bool, opener: Opener | None) -> ImageSet:
    # Downloads without a --data-root are stored here, and used again without a request.
    home = cache.folder() / "official" / what.name if root is None else root
    if root is not None and not root.is_dir() and not fetch_it:
        state = "is not a directory" if root.exists() else "does not exist"
        raise InvalidInputError(f"--data-root {root} {state}")
    try:
        files = _from_files(home, what, split)
    except OSError:
        if root is not None:
            raise
        files = None  # the cache is another user's
    if files is None and fetch_it:
        download(what, home, opener=opener)
        files = _from_files(home, what, split)
    if files is not None:
        return files
    if root is None:
        return _stand_in(what, split, what.name)
    expected = f"{what.folder}/{what.files[split][0][0]} or {what.archive}"
    if not what.archive:
        expected = " and ".join(f"{n}(.gz)" for n, _ in what.files[split])
    raise InvalidInputError(
        f"no {what.title} in --data-root {root}: looked for {expected}; leave --data-root out for made-up images"
    )


def open_split(
    name: str,
    *,
    split: Split,
    root: Path | None,
    input_shape: Shape | None = None,
    download: bool = False,
    opener: Opener | None = None,
) -> ImageSet:
    """One split of a data set, in memory.

    ``cifar100``, ``cifar10`` and ``mnist`` are read from the official files in ``root`` (the folder of the binary
    version, its files, or the .tar.gz; idx files, gzipped or not). Without ``root``, the embedded default of the same
    format is used; ``synthetic`` is that default by its own name. ``digits`` are real handwritten digits of 8x8;
    ``shapes`` are scenes with a class for every pixel; ``sentiment`` is text; these need no root. Names of the user's
    own data have the forms of :mod:`asa.zoo.specs`.

    Args:
        input_shape: (C, H, W) of the model. Other images are converted, and ``source`` says so. For a model that takes
            (T,) tokens, the synthetic language replaces synthetic images.
        download: download missing official files from their own addresses; the only case that uses a network.
        opener: replaces ``urllib.request.urlopen``.

    Raises:
        UsageError: an unknown name or split, or channels that cannot be converted.
        InvalidInputError: a ``root`` without the files, or with files that cannot be used.
        UnavailableError: a download that failed.
    """
    if name not in NAMES and not specs.is_own(name):
        raise UsageError(f"no data set is called {name!r}; there are {', '.join(NAMES)}, {specs.FORMS}")
    if split not in ("train", "test"):
        raise UsageError(f"data sets have the splits train and test, not {split!r}")
    if specs.is_own(name):
        from asa.zoo.data import own

        return own.open_own(name, split, input_shape)
    if name == "sentiment":
        return _sentiment(split, input_shape)
    if name == "shapes" and not (input_shape is not None and of_tokens(input_shape)):
        return _shapes(split, input_shape or (3, 32, 32))
    if input_shape is not None and of_tokens(input_shape) and name in _STAND_INS:
        return language(split, input_shape[0])
    if name == "shapes":
        raise UsageError("shapes has images, the model reads tokens; train it on --data synthetic or sentiment")
    if name == "digits":
        images = _digits(split)
    elif name == "synthetic":
        images = _stand_in(CIFAR100, split, name)
    else:
        images = _official(OFFICIAL[name], split, root, download, opener)
    return reshaped(images, input_shape)
