"""The user's own data as an :class:`ImageSet`. It is read completely, and again only where its files have changed; a
fixed fifth is for testing, unless a test part is given.

Images stay bytes and are converted to the model's shape. Everything else is numbers: columns of a table are scaled to
mean 0 and standard deviation 1 of the training part; floating samples of a dataset are used unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from asa.errors import InvalidInputError, UnavailableError, UsageError
from asa.zoo.data.draws import key, permutation
from asa.zoo.data.images import ImageSet, converted
from asa.zoo.data.language import TokenSet
from asa.zoo.data.official import Split
from asa.zoo.inputs import Shape, described, of_tokens

Samples = tuple[Tensor, Tensor]
"""Inputs [N, ...] and classes int64 [N, ...]."""


class TableError(UsageError):
    """A table does not have as many columns of numbers as the model takes. ``shape`` is the input that it fits."""

    def __init__(self, message: str, shape: Shape) -> None:
        self.shape = shape
        super().__init__(message)


_MOST_SAMPLES, _MOST_BYTES = 1_000_000, 1 << 32
"""Most samples, and bytes of them, that are read of what does not say how many it has: it may never end."""
_TEST_SHARE = 5
"""Divisor: one of this many samples is for testing, if the data has no test part."""
_SALT = 5
_CONSTANT = 1e-13
"""Share of its largest number up to which the standard deviation of a column is rounding."""
_LOOKS = 2**26
"""Number of bytes of samples after which free memory is looked at again."""


def open_own(spec: str, split: Split, shape: Shape | None) -> ImageSet:
    """One split of ``spec`` for a model with input ``shape`` [C, H, W].

    Raises:
        UsageError: samples have another shape than the model takes.
        InvalidInputError: files, or a function of the user's own, cannot be used.
        UnavailableError: the package that reads them is not installed.
    """
    train, test, classes, description = _both(spec, shape, _state(spec))
    inputs, labels = train if split == "train" else test
    source = f"{description}, {split}: {len(labels)} samples of {classes} classes."
    if inputs.dim() == 2:
        return TokenSet(
            images=inputs, labels=labels, num_classes=classes, name=spec, source=source, shape=(inputs.shape[1],)
        )
    image = inputs.dtype == torch.uint8
    mean, std = _statistics(train[0]) if image else ((0.0,) * inputs.shape[1], (1.0,) * inputs.shape[1])
    return ImageSet(
        images=inputs, labels=labels, num_classes=classes, mean=mean, std=std, name=spec,
        source=source, shape=(inputs.shape[1], inputs.shape[2], inputs.shape[3]), flips=image,
    )  # fmt: skip


_FOLDERS, _FILES = ("folder", "parquet", "coco", "hf"), ("csv", "arrow")
"""Origins of data whose rest is the path of a folder (or of a file), and of a file."""


def _state(spec: str) -> tuple[object, ...]:
    """A value that changes if the files that ``spec`` names change, or if another working directory has other files
    there. Changes of a function of the user's own, or of the hub, are not seen."""
    origin, _, rest = spec.partition(":")
    paths, found = [rest] if origin in (*_FOLDERS, *_FILES) else [], list[tuple[str, int, int, int]]()
    if origin in _FOLDERS:
        paths += [os.path.join(at, name) for at, folders, files in os.walk(rest) for name in (*folders, *files)]
    for path in paths:
        with suppress(OSError, ValueError):  # there is no such file, and the reader says so
            known = os.stat(path)
            found.append((path, known.st_ino, known.st_size, known.st_mtime_ns))
    return "" if os.path.isabs(rest) else os.getcwd(), *sorted(found)


@lru_cache(maxsize=2)
def _both(spec: str, shape: Shape | None, _files: tuple[object, ...]) -> tuple[Samples, Samples, int, str]:
    """Training and test samples in the model's shape, the number of classes, and a description."""
    from asa.zoo.data import coco, readers

    origin, _, rest = spec.partition(":")
    named: dict[str, Callable[[str, Shape | None], readers.Parts]] = {
        "folder": readers.folder, "csv": readers.csv_table, "parquet": partial(readers.columnar, "parquet"),
        "arrow": partial(readers.columnar, "arrow"), "coco": coco.folder, "hf": readers.hub,
    }  # fmt: skip
    parts = named[origin](rest, shape) if origin in named else from_factory(spec, shape)
    train, test = (parts.train, parts.test) if parts.test is not None else _divided(parts.train)
    if not len(train[1]) or not len(test[1]):
        few = f"number of samples: {len(train[1])} to train on and {len(test[1])} to test on"
        need = (
            "each needs at least 1" if parts.test is not None else f"give {_TEST_SHARE} or more, a fifth is for testing"
        )
        raise InvalidInputError(f"--data {spec}: {few}; {need}")
    if parts.scaled:
        train, test = _scaled(train, test, spec)
    for x, _ in (train, test):
        if x.is_complex() or (x.is_floating_point() and not torch.isfinite(x).all()):
            raise InvalidInputError(f"--data {spec}: a sample has values that are not finite real numbers")
    train, test = ((_shaped(x, shape, spec), _sized(_labels(y, x, spec), shape)) for x, y in (train, test))
    lowest, highest = (int(extreme) for extreme in train[1].aminmax())
    if lowest == highest:
        raise InvalidInputError(
            f"--data {spec}: all {len(train[1])} samples to train on are of class {lowest}; 2 classes are needed"
        )
    lowest, highest = min(lowest, int(test[1].min())), max(highest, int(test[1].max()))
    if lowest < 0:
        raise InvalidInputError(f"--data {spec}: class {lowest} is below 0; classes are numbered from 0")
    only = sorted(set(test[1].unique().tolist()) - set(train[1].unique().tolist()))
    aside = f"; classes that are only tested: {', '.join(map(str, only[:5]))}" if only else ""
    return train, test, 1 + highest, parts.description + aside


def _scaled(train: Samples, test: Samples, spec: str) -> tuple[Samples, Samples]:
    """Columns of numbers, float64 [N, K], as float32 with mean 0 and standard deviation 1 in ``train``. A column that
    is constant there becomes 0.

    Raises:
        InvalidInputError: numbers too large for that.
    """
    numbers = train[0]
    mean, std = numbers.mean(dim=0), numbers.std(dim=0, unbiased=False)
    largest = numbers.abs().amax(dim=0)
    if not torch.isfinite(std).all():
        raise InvalidInputError(f"--data {spec}: numbers of {float(largest.max()):g} are too large to be scaled")
    std[std <= _CONSTANT * largest] = torch.inf
    of_train, of_test = (((x - mean) / std).float() for x in (numbers, test[0]))
    return (of_train, train[1]), (of_test, test[1])


def _labels(y: Tensor, x: Tensor, spec: str) -> Tensor:
    """Classes as [N], or [N, T] for T tokens, or [N, H, W] for the pixels of an image; dimensions of 1 are dropped.

    Raises:
        InvalidInputError: they have another shape, as one-hot vectors have.
    """
    if y.dim() > 1 and y[0].numel() == 1 and x[0].numel() > 1:
        return y.reshape(len(y))
    if y.dim() == 4 and y.shape[1] == 1:
        y = y[:, 0]
    if (
        y.dim() == 1
        or (y.dim() == 2 and not x.is_floating_point() and y.shape == x.shape)
        or (y.dim(), x.dim()) == (3, 4)
    ):
        return y
    raise InvalidInputError(
        f"--data {spec}: the classes of a sample have shape {'x'.join(map(str, y.shape[1:]))}; give one number, a "
        "number for every token, or for every pixel (the number of a class, not a one-hot vector)"
    )


def _divided(samples: Samples) -> tuple[Samples, Samples]:
    """(training, test): the samples divided, a fifth for testing, always in the same way."""
    x, y = samples
    order = permutation(key(len(y), _SALT), len(y))
    cut = len(y) // _TEST_SHARE
    return (x[order[cut:]], y[order[cut:]]), (x[order[:cut]], y[order[:cut]])


def _shaped(x: Tensor, shape: Shape | None, spec: str) -> Tensor:
    """Samples [N, ...] as [N, C, H, W]. Images are converted, numbers are arranged, and tokens [N, T] are unchanged."""
    if shape is not None and of_tokens(shape):
        if x.dtype == torch.int64 and tuple(x.shape[1:]) == tuple(shape):
            return x
        have, size = _format(x)
        advice = f"plan it for such data: --input {size}"
        raise UsageError(f"--data {spec} gives {have}, the model reads {shape[0]} tokens; {advice}")
    if not x.is_floating_point() and x.dtype != torch.uint8 and (shape is not None or x.dim() != 2):
        raise UsageError(
            f"--data {spec} gives {_format(x)[0]}, the model takes {described(shape or x.shape[1:])}; give float32 for "
            "numbers, uint8 for images, or plan a model that reads tokens"
        )
    if x.dtype == torch.uint8 and x.dim() == 2 and (shape is None or shape[1] == 1):
        raise UsageError(
            f"--data {spec} gives {_format(x)[0]} of uint8, which is for images: they would be shifted and mirrored; "
            "give float32 for numbers"
        )
    if shape is not None and shape[1] == 1 and x.dtype == torch.uint8 and x.dim() == 4 and x.shape[2] > 1:
        have, size = _format(x)
        raise UsageError(
            f"--data {spec} gives {have}, the model takes {described(shape)}; profile it with --input {size}"
        )
    if x.dtype == torch.uint8 and x.dim() == 4 and (shape is None or tuple(x.shape[1:]) != tuple(shape)):
        return x if shape is None else _converted(x, shape, spec)
    target = shape or (1, 1, prod(x.shape[1:]))  # images of that very shape pass, too
    if prod(x.shape[1:]) != prod(target) or (x.dim() == 4 and tuple(x.shape[1:]) != tuple(target)):
        have, size = _format(x)
        message = f"--data {spec} gives {have}, the model takes {described(target)}; profile it with --input {size}"
        raise TableError(message, (1, 1, x.shape[1])) if x.dim() == 2 else UsageError(message)
    return x.reshape(len(x), *target)


def _format(x: Tensor) -> tuple[str, str]:
    """What samples [N, ...] are, in words, and the ``--input`` of a model for them."""
    sizes = "x".join(map(str, x.shape[1:]))
    if x.dim() == 4:
        return f"images of {sizes}", sizes
    if x.dim() == 2 and x.dtype == torch.int64:
        return f"{sizes} tokens", sizes
    return f"{prod(x.shape[1:])} numbers", f"1x1x{prod(x.shape[1:])}"


def _sized(y: Tensor, shape: Shape | None) -> Tensor:
    """Class maps [N, H, W] resized to the model's images, by nearest pixel."""
    if shape is None or y.dim() != 3 or len(shape) != 3 or tuple(y.shape[1:]) == tuple(shape[1:]):
        return y
    down, right = (torch.arange(n) * have // n for n, have in zip(shape[1:], y.shape[1:], strict=True))
    return y[:, down[:, None], right[None, :]]


def _converted(x: Tensor, shape: Shape, spec: str) -> Tensor:
    if x.shape[3] in (1, 3, 4) and x.shape[1] > 4:
        raise UsageError(
            f"--data {spec} gives images of {'x'.join(map(str, x.shape[1:]))}, with channels last; give [C, H, W], as "
            "permute(2, 0, 1) does"
        )
    if x.shape[1] not in (1, shape[0]) and shape[0] != 1:
        raise UsageError(
            f"--data {spec} has {x.shape[1]} channels, the model takes {shape[0]}; profile it with "
            f"--input {x.shape[1]}x{shape[1]}x{shape[2]}"
        )
    return converted(x, shape)


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 [N, C, H, W], for pixels scaled to 0..1."""
    sums = sum(part.double().div_(255).sum(dim=(0, 2, 3)) for part in images.split(1024))
    squares = sum(part.double().div_(255).square_().sum(dim=(0, 2, 3)) for part in images.split(1024))
    assert isinstance(sums, Tensor)
    assert isinstance(squares, Tensor)
    count = images.numel() / images.shape[1]
    mean = sums / count
    std = (squares / count - mean.square()).clamp_min(1e-12).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def from_factory(spec: str, shape: Shape | None) -> Any:
    """Result of ``package.module:factory``, called with ``input_shape`` if it takes it: a dataset of pairs (input,
    class) or of dictionaries of both, map-style or iterable; a ``DataLoader`` (with any collation); or two of them, the
    second for testing.

    Raises:
        UsageError: the spec does not name a function.
        InvalidInputError: it fails, or returns something else.
    """
    from asa.zoo.data.readers import Parts
    from asa.zoo.foreign import accepted, at_home, factory, first_line

    pair, parts = False, []
    with at_home():
        function = factory(spec, "data")
        try:
            result = function(**accepted(function, {"input_shape": shape}))
            pair = isinstance(result, tuple) and len(result) == 2 and not isinstance(result[0], Tensor)
            parts = [_read(part, spec) for part in (result if pair else (result,))]
        except (InvalidInputError, UsageError, UnavailableError):
            raise
        except (Exception, SystemExit) as error:
            raise InvalidInputError(f"data {spec!r} failed with {first_line(error)}") from None
    return Parts(train=parts[0], test=parts[1] if pair else None, description=f"Data of {spec}")


def _read(dataset: Any, spec: str) -> Samples:
    """All samples of a dataset, in order; those of a loader come in batches.

    Raises:
        InvalidInputError: it has none, does not end, or they do not fit together.
        UnavailableError: they do not fit in memory.
    """
    import psutil
    from torch.utils.data import DataLoader, IterableDataset

    samples: Iterable[Any]
    if isinstance(dataset, DataLoader | IterableDataset):  # the latter has a __getitem__ that only raises
        samples = dataset
    elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        samples = (dataset[i] for i in range(len(dataset)))
    elif hasattr(dataset, "__iter__"):
        samples = dataset
    else:
        raise InvalidInputError(f"data {spec!r}: the function returned {str(dataset)[:40]!r}, not a dataset")
    batched, needed, seen = isinstance(dataset, DataLoader), 0, 0
    length = _length(dataset)
    pairs: list[tuple[Tensor, Tensor]] = []
    count = 0
    for sample in samples:
        pairs.append(_pair(sample, spec))
        count += len(pairs[-1][1]) if batched and pairs[-1][1].dim() else 1
        needed += pairs[-1][0].nbytes
        if length is None and (count > _MOST_SAMPLES or needed > _MOST_BYTES):
            raise InvalidInputError(
                f"data {spec!r} has not ended after {count - 1} samples, {needed / (1 << 30):.2g} GiB, and all are "
                f"read into memory; let it end, as itertools.islice(samples, {min(count - 1, 50_000)}) does, or give "
                "it a __len__"
            )
        if length is not None and len(pairs) > length:
            raise InvalidInputError(f"data {spec!r}: its __len__ is {length}, but it goes on; let it end there")
        if needed - seen > _LOOKS:
            seen, free = needed, psutil.virtual_memory().available
            if free < needed:  # they are copied once
                raise UnavailableError(
                    f"data {spec!r}: {count} samples take {needed} bytes and {free} are free, too few for a copy; "
                    "give fewer or smaller ones, or train with asa.parallelize, which takes any loader"
                )
    if not pairs:
        raise InvalidInputError(f"data {spec!r} has no samples")
    inputs, classes = [x for x, _ in pairs], [y for _, y in pairs]
    if not batched:
        return _stacked(inputs, spec), _integers(_stacked(classes, spec), spec)
    for values in (inputs, classes):
        if any(v.dim() == 0 for v in values):
            raise InvalidInputError(f"data {spec!r}: a batch of the loader has no dimension of samples")
        _check_shapes([v[:1] for v in values], spec)
    if any(len(x) != len(y) for x, y in pairs):
        raise InvalidInputError(f"data {spec!r}: a batch of the loader has not as many classes as inputs")
    return torch.cat(inputs), _integers(torch.cat(classes), spec)


def _length(dataset: Any) -> int | None:
    """The number of samples, or of batches of a loader; None where it is unknown."""
    try:
        return len(dataset)
    except TypeError:
        return None


def _integers(classes: Tensor, spec: str) -> Tensor:
    """Classes as int64.

    Raises:
        InvalidInputError: one is not a whole number.
    """
    broken = classes != classes.round() if classes.is_floating_point() else torch.zeros(1, dtype=torch.bool)
    if classes.is_complex() or broken.any():
        raise InvalidInputError(f"data {spec!r}: classes are whole numbers from 0, not {classes[broken][:1].tolist()}")
    return classes.long()


def _pair(sample: Any, spec: str) -> tuple[Tensor, Tensor]:
    if isinstance(sample, Mapping):
        sample = _of_names(sample, spec)
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise InvalidInputError(f"data {spec!r}: a sample is a {type(sample).__name__}, not a pair (input, class)")
    for value, what in zip(sample, ("an input", "a class"), strict=True):
        if isinstance(value, str | bytes) or value is None:
            raise InvalidInputError(f"data {spec!r}: {what} is {str(value)[:40]!r}, not a tensor or number")
    return _tensor(sample[0]), _tensor(sample[1])


def _of_names(sample: Mapping[Any, Any], spec: str) -> tuple[Any, Any]:
    """(input, class) of a sample with names, of which one is a usual one for the class.

    Raises:
        InvalidInputError: there is no such name, or there are several inputs.
    """
    from asa.zoo.data.readers import LABELS, listed

    label = next((n for usual in LABELS for n in sample if str(n).strip().lower() == usual), None)
    inputs = [n for n in sample if n != label]
    if label is None or len(inputs) != 1:
        raise InvalidInputError(
            f"data {spec!r}: a sample has the names {listed(map(str, sample))}; give a pair (input, class), or one "
            f"input beside {LABELS[0]!r}"
        )
    return sample[inputs[0]], sample[label]


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # an image of Pillow
        from torchvision.transforms.functional import pil_to_tensor

        return pil_to_tensor(value)  # type: ignore[no-any-return]
    return torch.as_tensor(value)


def _stacked(values: list[Tensor], spec: str) -> Tensor:
    _check_shapes(values, spec)
    return torch.stack(values)


def _check_shapes(values: list[Tensor], spec: str) -> None:
    """Check that all samples have one shape.

    Raises:
        InvalidInputError: they have not.
    """
    shapes = {tuple(v.shape) for v in values}
    if len(shapes) > 1:
        texts = ", ".join("x".join(map(str, s)) or "one number" for s in sorted(shapes)[:3])
        raise InvalidInputError(f"data {spec!r}: samples of different shapes ({texts}); let it give out one shape")
