"""Named units. Records contain plain seconds, bytes and FLOPs. Seconds and bytes are formatted here for messages of all
packages, other units in ``asa.report``."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

MOST_SECONDS = 1e9
"""Longest time in a file, 30 years, so that sums and products of times stay far from infinity."""

MOST_SAMPLES = 2**24
"""Largest global batch: far more than any training has used."""

MOST_DEVICES = 2**14
"""Largest number of devices of a cluster: no published collective had more."""

MOST_VALUES = 2**28
"""Largest number of values of one input: an image of 3 x 9,459 x 9,459, larger than any in training."""

MOST_CLASSES = 2**24
"""Largest number of classes of a model: larger than any vocabulary."""

MOST_SCALE = 1e6
"""Largest factor on a profile's memory; a larger one is not a plausible correction."""

MOST_AMOUNT = 1e30
"""Largest number of bytes, FLOPs, or either per second in a file, so that sums and products stay far from infinity."""

LEAST_RATE = 1e6
"""Smallest FLOP/s or bytes/s of a device: less would be a number in another unit (900 GB/s, 35 TFLOPS)."""


def time_span(text: str) -> float:
    """Seconds of a time span: ``90s``, ``10m``, ``2h``; a bare number is seconds.

    >>> time_span("90s"), time_span("1.5h"), time_span("0.5")
    (90.0, 5400.0, 0.5)

    Raises:
        ValueError: it is not a time span, or not above 0.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([smh]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a time span; write 90s, 10m or 2h")
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"{text} is not above 0 s and at most {MOST_SECONDS:g} s")
    return seconds


def binary(value: float) -> str:
    """Bytes as text, in the binary unit that fits.

    >>> [binary(v) for v in (17, 2048, 3.5 * 1024**2, 80 * 1024**3)]
    ['17 B', '2.00 KiB', '3.50 MiB', '80.0 GiB']
    """
    for limit, scale, unit in ((MIB, KIB, "KiB"), (GIB, MIB, "MiB")):
        if abs(value) < limit:
            return f"{figures(value / scale)} {unit}" if abs(value) >= KIB else f"{value:.0f} B"
    return f"{figures(value / GIB)} GiB"


def figures(value: float) -> str:
    """Number as text with three significant digits; whole numbers from a hundred up."""
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


def seconds(value: float) -> str:
    """Seconds as text: three significant digits with the unit that fits.

    >>> [seconds(v) for v in (0.0000123, 0.00456, 1.236, 83.5, 4000)]
    ['12.3 us', '4.56 ms', '1.24 s', '83.5 s', '66.7 min']
    """
    if abs(value) < 5e-9:
        return "0 s"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (600.0, 1.0, "s")):
        if abs(value) < limit:
            return f"{figures(value * scale)} {unit}"
    return f"{figures(value / 60)} min"
