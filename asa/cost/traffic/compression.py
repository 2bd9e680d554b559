"""What compressing gradients does to the traffic a strategy declares; :mod:`asa.sharding.compression` does it."""

from __future__ import annotations

from math import sqrt

from asa.ir.plan import POWERSGD_RANK, CompressionName
from asa.ir.traffic import Collective

_WORD = 4
"""Bytes of a gradient's element: parameters are kept in fp32 whatever forward and backward compute in."""


def remaining(name: CompressionName, moved: Collective, num_tensors: int, *, whole: bool) -> float:
    """The share of its bytes that a gradient collective still moves; 1 for any other collective.

    ``whole``: a rank's gradients are whole, as in the buckets of data parallelism; only these are sent as factors. A
    tensor of n elements has factors of at least ``2 sqrt(n)`` rows together, which is taken for their size.
    """
    if moved.phase != "gradient" or name == "none":
        return 1.0
    if name != "powersgd":
        return 0.5
    elements = moved.bytes / _WORD / max(1, num_tensors)
    return min(1.0, 2 * POWERSGD_RANK / sqrt(max(1.0, elements))) if whole else 1.0
