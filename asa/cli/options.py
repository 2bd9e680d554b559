"""Options that several commands share, and parsers for their values."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from asa.cli.verb import Arguments, Option
from asa.errors import UsageError
from asa.ir.units import GIB, time_span
from asa.zoo import specs

_MOST_SEED = 2**32 - 1
_MOST_GIB = 2**20
_UNITS = {"tib": 2**40, "gib": 2**30, "mib": 2**20, "kib": 2**10, "tb": 10**12, "gb": 10**9, "mb": 10**6, "kb": 10**3}


def count(text: str) -> int:
    """Parse a whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise ValueError(f"{value} is below 1")
    return value


def several(text: str) -> int:
    """Parse a whole number from 2."""
    value = count(text)
    if value < 2:
        raise ValueError(f"{value} is below 2, the fewest that can be compared")
    return value


def natural(text: str) -> int:
    """Parse a whole number from 0."""
    if text.strip().startswith("-") and text.strip()[1:].isdecimal() and int(text):
        raise ValueError(f"{text.strip()} is below 0")
    return 0 if text.strip() in ("0", "-0") else count(text)


def seed(text: str) -> int:
    """Parse a whole number from 0 that is a valid seed for all generators."""
    value = natural(text)
    if value > _MOST_SEED:
        raise ValueError(f"{value} is above {_MOST_SEED}")
    return value


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not value > 0:
        raise ValueError(f"{text} is not above 0")
    if value == math.inf:
        raise ValueError(f"{text} is too large for a number")
    return value


def price(text: str) -> float:
    """Parse the price of a device per hour: a number, with or without its unit.

    >>> price("2.49"), price("2.49/gpu-h"), price("$2.49/h")
    (2.49, 2.49, 2.49)
    """
    match = re.fullmatch(
        r"\s*[^\w\s.+-]?\s*([^/\s]+)\s*(?:/\s*(?:(?:gpu|device)[-\s]?)?(?:h|hr|hour))?\s*", text.lower()
    )
    if not match:
        raise ValueError(f"{text!r} is no price of a device for an hour; write 2.49 or 2.49/gpu-h")
    return positive(match[1])


def gibibytes(text: str) -> int:
    """Parse a number of GiB, or of another named unit; returns bytes.

    >>> gibibytes("1.5"), gibibytes("1.5GiB"), gibibytes("512 MiB"), gibibytes("80GB")
    (1610612736, 1610612736, 536870912, 80000000000)
    """
    match = re.fullmatch(r"\s*(.*?)\s*(TiB|GiB|MiB|KiB|TB|GB|MB|KB)?\s*", text, re.IGNORECASE | re.DOTALL)
    assert match is not None, "every text is a number and a unit, or no unit"
    try:
        float(match[1])
    except ValueError:
        raise ValueError(f"{text!r} is no amount of memory; write 80, 80GiB or 512MiB") from None
    value = positive(match[1]) * _UNITS[(match[2] or "GiB").lower()] / GIB
    if value > _MOST_GIB:
        raise ValueError(f"{text} GiB is above {_MOST_GIB}, more than any device has")
    return int(value * GIB)


def shape(text: str) -> tuple[int, int, int]:
    """Parse channels x height x width.

    >>> shape("3x32x32")
    (3, 32, 32)
    """
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"{text!r} is not CxHxW, as in 3x32x32")
    return int(parts[0]), int(parts[1]), int(parts[2])


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas; duplicates are removed.

    >>> names("ddp, tensor")
    ('ddp', 'tensor')
    """
    values = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not values:
        raise ValueError("the list is empty")
    return values


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1 separated by commas; duplicates are removed.

    >>> counts("1,2, 4")
    (1, 2, 4)
    """
    return tuple(dict.fromkeys(count(part.strip()) for part in names(text)))


def seeds(text: str) -> tuple[int, ...]:
    """Parse seeds separated by commas; duplicates are removed."""
    return tuple(dict.fromkeys(seed(part) for part in names(text)))


def word(text: str) -> str:
    """Parse a name that is written into a job file as it is: of printable characters other than blanks and quotes.

    >>> word("nvcr.io#nvidia/pytorch:26.10-py3")
    'nvcr.io#nvidia/pytorch:26.10-py3'
    """
    odd = next((c for c in text if c.isspace() or not c.isprintable() or c in "'\"`"), None)
    if odd is not None or not text:
        raise ValueError(f"{text!r} contains {odd!r}" if odd else "an empty text is no value; leave it out")
    return text


def share(text: str) -> float:
    """Parse a fraction, as a number up to 1 or in per cent.

    >>> share("0.9"), share("90%")
    (0.9, 0.9)
    """
    value = positive(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    if value > 1:
        raise ValueError(f"{text} is above 1; write 0.9 or 90%")
    return value


def check_model(args: Arguments, model: str) -> None:
    """Check the name of a model, and that it reads what ``--input`` or ``--tokens`` describe, without building it.

    Raises:
        UsageError, UnavailableError: it cannot be that.
    """
    from asa.zoo import names

    names.check(model)
    if args.input or args.tokens:
        names.check_kind(model, bool(args.tokens))


def input_shape(args: Arguments) -> tuple[int, ...] | None:
    """Shape of a sample from ``--input`` or ``--tokens``; None if neither is given.

    Raises:
        UsageError: both are given.
    """
    if args.tokens and args.input:
        raise UsageError("--input is the size of images, --tokens the length of sequences: a model reads one of them")
    return (args.tokens,) if args.tokens else args.input


def several_data(text: str) -> tuple[str, ...]:
    """Parse data sets separated by commas.

    Raises:
        ValueError: one is not a data set.
    """
    return tuple(data(name) for name in names(text))


def data(text: str) -> str:
    """Parse a data set: its name or its location.

    Raises:
        ValueError: it is neither.
    """
    specs.check_form(text)
    return text


def option(base: Option, **changes: Any) -> Option:
    """A shared option with changed fields, such as default or help."""
    return dataclasses.replace(base, **changes)


def number(name: str, *, help: str, metavar: str = "N", **more: Any) -> Option:
    """An option that takes a whole number from 1."""
    return Option(name=name, help=help, parse=count, metavar=metavar, **more)


def switch(name: str, *, help: str, **more: Any) -> Option:
    """An option without a value."""
    return Option(name=name, help=help, switch=True, default=False, **more)


def span(name: str, *, help: str, **more: Any) -> Option:
    """An option that takes a time span."""
    return Option(name=name, help=help, parse=time_span, metavar="T", **more)


REPORT = Option(name="report", help="write report.html and figures to DIR", metavar="DIR")
VERBOSE = Option(name="verbose", short="-v", help="show everything", switch=True, default=False)
JSON = Option(name="json", help="print one JSON document on stdout, everything else on stderr", switch=True)


def file_name(text: str) -> str:
    """``text`` as the name of a file to write.

    Raises:
        ValueError: it is empty, or ``-``, which other programs take for the screen.
    """
    if not text.strip():
        raise ValueError("an empty text is no value; leave it out")
    if text == "-":
        raise ValueError("'-' is no file; /dev/stdout is the screen, ./- a file of that name")
    return text


OUTPUT = Option(name="output", short="-o", help="file to write", parse=file_name, metavar="FILE")
DEVICE = Option(
    name="device", help="where to run; auto: CUDA if there is a GPU", choices=("auto", "cpu", "cuda"), default="auto"
)
MEMORY_FORMAT = Option(
    name="memory-format",
    help="order of image data in memory",
    choices=("contiguous", "channels_last"),
    default="contiguous",
)
COMPILE = Option(
    name="compile",
    help="use torch.compile on every component, or on the whole model (for one device); graphs: also capture CUDA "
    "graphs of components",
    choices=("none", "components", "whole", "graphs"),
    default="none",
)
PRECISION = Option(
    name="precision",
    help="arithmetic of forward and backward",
    choices=("fp32", "tf32", "bf16", "fp16"),
    default="fp32",
)
INPUT = Option(
    name="input", help="size of one image (default: the model's own, mostly 3x32x32)", parse=shape, metavar="CxHxW"
)
TOKENS = Option(
    name="tokens",
    help="tokens of one sequence, for language models (default: the model's own)",
    parse=count,
    metavar="T",
)
CLASSES = Option(
    name="classes",
    help="number of classes, or size of the vocabulary (default: 100, or the model's own)",
    parse=count,
    metavar="K",
)
GLOBAL_BATCH = Option(name="global-batch", help="samples per optimizer step, over all ranks", parse=count, metavar="B")
GPUS = Option(name="gpus", help="number of devices, one rank each (CPU: cores)", parse=count, metavar="N")
CLUSTER = Option(
    name="cluster",
    help="name from `asa cluster list`, or a file (default: the newest measured on such devices)",
    metavar="NAME|FILE",
)
MEMORY = Option(
    name="memory",
    help="memory per device in GiB, or with a unit: 80GB, 512MiB (default: all of it)",
    parse=gibibytes,
    metavar="GiB",
)
STRATEGIES = Option(
    name="strategies", help="consider only these, as in ddp,fsdp,asa (default: all)", parse=names, metavar="A,B"
)
PIN = Option(
    name="pin",
    help="fix the strategy of components, as in 'layer4.*=zero3@4' or 'classifier=tensor@2'; repeatable",
    metavar="COMPONENT=STRATEGY@DEGREE",
    repeated=True,
)
SOLVER = Option(
    name="solver",
    help="search by an integer program, dynamic programming, or complete enumeration",
    choices=("ilp", "dp", "exhaustive"),
    default="ilp",
)
OPTIMIZER = Option(
    name="optimizer", help="optimizer; decides memory and update time", choices=("sgd", "adamw"), default="sgd"
)
COMPRESS = Option(
    name="compress",
    help="compress gradients between ranks; this changes results slightly",
    choices=("none", "fp16", "bf16", "powersgd"),
)
SEED = Option(name="seed", help="seed of weights, sample order and dropout", parse=seed, default=0, metavar="S")
DATA = Option(
    name="data",
    help="cifar100, cifar10, mnist, digits, synthetic, shapes, sentiment, folder:DIR, coco:DIR, csv:FILE, "
    "parquet:FILE, arrow:FILE, hf:NAME, or package.module:factory (default: cifar100)",
    parse=data,
    default="cifar100",
    metavar="DATA",
)
DATA_ROOT = Option(
    name="data-root",
    help="folder with the official files of the data set (default: the download cache, else made-up images)",
    metavar="DIR",
    needs="data=cifar100|cifar10|mnist",
    harmless=True,
)
LEARNING_RATE = Option(
    name="lr", help="peak learning rate (default: 0.1 for sgd, 0.001 for adamw)", parse=positive, metavar="LR"
)
PRICE = Option(
    name="price", help="price of one device for an hour, in any currency, as in 2.49", parse=price, metavar="P"
)
MICROBATCHES = Option(
    name="microbatches",
    help="microbatches of one step, a power of two (default: the fastest number)",
    parse=count,
    metavar="N",
)
PLAN = Option(name="plan", help="plan file (default: the newest in runs/plans)", positional=True, metavar="PLAN")
PROFILE = Option(
    name="profile", help="profile that the plan was made from (default: found by fingerprint)", metavar="FILE"
)
MODEL = Option(
    name="model",
    help="a torchvision name, gpt2[:SIZE], llama:SIZE, timm:NAME, hf:NAME, or package.module:factory",
    positional=True,
    required=True,
    metavar="MODEL",
)
