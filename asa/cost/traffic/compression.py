"""Bytes of gradient traffic under compression; :mod:`asa.sharding.compression` implements it."""

from __future__ import annotations

from math import sqrt

from asa.ir.plan import POWERSGD_RANK, CompressionName
from asa.ir.traffic import Collective

_WORD = 4
"""Bytes of an element of a gradient: parameters are fp32, whatever the precision of forward and backward."""


def remaining(name: CompressionName, moved: Collective, num_tensors: int, *, whole: bool) -> float:
    """The share of its bytes that a collective still moves under compression ``name``; 1 if it moves no gradients.

    ``whole``: each rank has whole gradients, as in the buckets of DDP; PowerSGD compresses only these, into two
    low-rank factors. The factors of a tensor of n elements together have at least ``2 sqrt(n)`` rows; the share is
    computed with this bound. Vogels et al. 2019, "PowerSGD".
    """
    if moved.phase != "gradient" or name == "none":
        return 1.0
    if name != "powersgd":
        return 0.5
    elements = moved.bytes / _WORD / max(1, num_tensors)
    return min(1.0, 2 * POWERSGD_RANK / sqrt(max(1.0, elements))) if whole else 1.0
