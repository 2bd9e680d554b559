"""The user's own data as an :class:`ImageSet`. It is read completely, once; a fixed fifth is for testing, unless a test
part is given.

Images stay bytes and are converted to the model's shape. Everything else is numbers: columns of a table are scaled to
mean 0 and standard deviation 1 of the training part; floating samples of a dataset are used unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from asa.errors import InvalidInputError, UnavailableError, UsageError
from asa.zoo.data.draws import key, permutation
from asa.zoo.data.images import ImageSet, convert
from asa.zoo.data.language import TokenSet
from asa.zoo.data.official import Split
from asa.zoo.inputs import Shape, described, of_tokens

Samples = tuple[Tensor, Tensor]
"""Inputs [N, ...] and classes int64 [N, ...]."""

_MOST_SAMPLES = 10_000_000
_TEST_SHARE = 5
"""Divisor: one of this many samples is for testing, if the data has no test part."""
_SALT = 5


def open_own(spec: str, split: Split, shape: Shape | None) -> ImageSet:
    """One split of ``spec`` for a model with input ``shape`` [C, H, W].

    Raises:
        UsageError: samples have another shape than the model takes.
        InvalidInputError: files, or a function of the user's own, cannot be used.
        UnavailableError: the package that reads them is not installed.
    """
    train, test, classes, description = _both(spec, shape)
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


@lru_cache(maxsize=2)
def _both(spec: str, shape: Shape | None) -> tuple[Samples, Samples, int, str]:
    """Training and test samples in the model's shape, the number of classes, and a description."""
    from asa.zoo.data import coco, readers

    origin, _, rest = spec.partition(":")
    named: dict[str, Callable[[str, Shape | None], readers.Parts]] = {
        "folder": readers.folder, "csv": readers.csv_table, "parquet": readers.parquet, "arrow": readers.arrow,
        "coco": coco.folder, "hf": readers.hub,
    }  # fmt: skip
    parts = named[origin](rest, shape) if origin in named else from_factory(spec, shape)
    train, test = (parts.train, parts.test) if parts.test is not None else _divided(parts.train)
    if not len(train[1]) or not len(test[1]):
        few = f"number of samples: {len(train[1])} to train on and {len(test[1])} to test on"
        need = (
            "each needs at least 1" if parts.test is not None else f"give {_TEST_SHARE} or more, a fifth is for testing"
        )
        raise InvalidInputError(f"--data {spec}: {few}; {need}")
    for x, _ in (train, test):
        if x.is_complex() or (x.is_floating_point() and not torch.isfinite(x).all()):
            raise InvalidInputError(f"--data {spec}: a sample has values that are not finite real numbers")
    if parts.scaled:
        mean, std = train[0].mean(dim=0), train[0].std(dim=0, unbiased=False).clamp_min(1e-6)
        train, test = (((x - mean) / std, y) for x, y in (train, test))
    train, test = ((_shaped(x, shape, spec), _sized(y, shape)) for x, y in (train, test))
    lowest = min(int(train[1].min()), int(test[1].min()))
    if lowest < 0:
        raise InvalidInputError(f"--data {spec}: class {lowest} is below 0")
    return train, test, 1 + max(int(train[1].max()), int(test[1].max())), parts.description


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
        raise UsageError(
            f"--data {spec} gives {have}, the model takes {described(target)}; profile it with --input {size}"
        )
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
    if x.shape[1] not in (1, shape[0]) and shape[0] != 1:
        raise UsageError(
            f"--data {spec} has {x.shape[1]} channels, the model takes {shape[0]}; profile it with "
            f"--input {x.shape[1]}x{shape[1]}x{shape[2]}"
        )
    parts = [convert(part.float(), shape).round().clamp_(0, 255).to(torch.uint8) for part in x.split(256)]
    return torch.cat(parts)


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
    class), map-style or iterable; a ``DataLoader`` (with any collation); or two of them, the second for testing.

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
    """All samples of a dataset, in order."""
    from torch.utils.data import DataLoader

    if isinstance(dataset, DataLoader):
        pairs = [_pair(batch, spec) for batch in dataset]
        if not pairs:
            raise InvalidInputError(f"data {spec!r} has no samples")
        _check_shapes([x[0] for x, _ in pairs], spec)
        return torch.cat([x for x, _ in pairs]), _integers(torch.cat([y for _, y in pairs]), spec)
    samples: Iterable[Any]
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        samples = (dataset[i] for i in range(len(dataset)))
    elif hasattr(dataset, "__iter__"):
        samples = dataset
    else:
        raise InvalidInputError(f"data {spec!r}: the function returned {str(dataset)[:40]!r}, not a dataset")
    pairs = [_pair(sample, spec) for sample in islice(samples, _MOST_SAMPLES + 1)]
    if len(pairs) > _MOST_SAMPLES:
        raise InvalidInputError(f"data {spec!r}: more than {_MOST_SAMPLES} samples; they are read into memory")
    if not pairs:
        raise InvalidInputError(f"data {spec!r} has no samples")
    return _stacked([x for x, _ in pairs], spec), _integers(_stacked([y for _, y in pairs], spec), spec)


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
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise InvalidInputError(f"data {spec!r}: a sample is a {type(sample).__name__}, not a pair (input, class)")
    for value, what in zip(sample, ("an input", "a class"), strict=True):
        if isinstance(value, str | bytes) or value is None:
            raise InvalidInputError(f"data {spec!r}: {what} is {str(value)[:40]!r}, not a tensor or number")
    return _tensor(sample[0]), _tensor(sample[1])


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
