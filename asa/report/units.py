"""Plain seconds, bytes and counts as text."""

from __future__ import annotations

from asa.ir import units
from asa.ir.units import binary, figures

NOTHING = "-"
SHARES = ("accuracy", "top5")
"""Metrics of validation that are shares of the samples, 0 to 1."""


def seconds(value: float | None) -> str:
    """Seconds as text: three significant digits with the unit that fits.

    >>> [seconds(v) for v in (0.0000123, 0.00456, 1.236, 83.5, 4000)]
    ['12.3 us', '4.56 ms', '1.24 s', '83.5 s', '66.7 min']
    """
    return NOTHING if value is None else units.seconds(value)


def between(low: float, high: float) -> str:
    """Two times as text; a unit that both have is written once.

    >>> between(0.00688, 0.0257), between(0.804, 1.34)
    ('6.88 to 25.7 ms', '804 ms to 1.34 s')
    """
    (first, unit), (last, other) = (seconds(value).split() for value in (low, high))
    return f"{first} to {last} {unit}" if unit == other else f"{first} {unit} to {last} {other}"


def difference(value: float, *, plus: bool = False) -> str:
    """Signed seconds as text; ``plus`` also shows a positive sign. Zero has no sign.

    >>> difference(-2e-3), difference(2e-3), difference(2e-3, plus=True), difference(-1e-12)
    ('-2.00 ms', '2.00 ms', '+2.00 ms', '0 s')
    """
    text = seconds(abs(value))
    below = value < 0 and text != seconds(0.0)
    return f"{'-' if below else '+' * plus}{text}"


def size(value: float | None) -> str:
    """Bytes as text, in binary units.

    >>> [size(v) for v in (17, 2048, 3.5 * 1024**2, 80 * 1024**3)]
    ['17 B', '2.00 KiB', '3.50 MiB', '80.0 GiB']
    """
    return NOTHING if value is None else binary(value)


def rate(value: float | None) -> str:
    """Samples per second as text, with three digits.

    >>> rate(1528.3), rate(34.56)
    ('1528/s', '34.6/s')
    """
    return NOTHING if value is None else f"{figures(value)}/s"


def ranks(count: int) -> str:
    """A number of ranks as text.

    >>> ranks(1), ranks(2)
    ('1 rank', '2 ranks')
    """
    return f"{count} rank{'s' * (count != 1)}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """A fraction as text in per cent, with one decimal.

    >>> percent(0.1234), percent(-0.02, signed=True)
    ('12.3 %', '-2.0 %')
    """
    if value is None:
        return NOTHING
    return f"{100 * value:+z.1f} %" if signed else f"{100 * value:z.1f} %"


def flops(value: float | None) -> str:
    """Floating-point operations as text, in powers of a thousand.

    >>> flops(2.6e9)
    '2.60 GFLOP'
    """
    if value is None:
        return NOTHING
    for limit, scale, unit in ((1e6, 1e3, "kFLOP"), (1e9, 1e6, "MFLOP"), (1e12, 1e9, "GFLOP")):
        if abs(value) < limit:
            return f"{figures(value / scale)} {unit}"
    return f"{figures(value / 1e12)} TFLOP"


def error(predicted: float | None, measured: float | None) -> str:
    """Predicted over measured, minus 1, as text.

    >>> error(1.1, 1.0), error(1.0, None)
    ('+10.0 %', '-')
    """
    return NOTHING if predicted is None or not measured else percent(predicted / measured - 1, signed=True)
