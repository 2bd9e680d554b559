"""Measures a device's peak rates, the two ceilings of the roofline model (Williams, Waterman & Patterson 2009).

This takes seconds and is part of the profile, so both are measured at the same clocks.
"""

from __future__ import annotations

import torch

from asa.ir.profile import Ceilings, Precision
from asa.profiler.clock import solo_clock_of, time_repeatedly
from asa.tracing.autocast import LOWER

_SIDE = {"cuda": 4096, "cpu": 512}
_COPIED = {"cuda": 1 << 28, "cpu": 1 << 25}
"""Number of bytes to copy, larger than caches."""
_LEAST_S = 1e-9


def measure_ceilings(device: torch.device, precision: Precision, *, slice_s: float = 0.25) -> Ceilings | None:
    """Peak FLOP/s of a square matrix product, and bytes/s (read and written) of a copy; None if one of them does not
    fit in memory."""
    clock, side = solo_clock_of(device), _SIDE[device.type]
    try:
        a = torch.ones(side, side, device=device, dtype=LOWER.get(precision, torch.float32))
        product = time_repeatedly(lambda: a @ a, clock, slice_s=slice_s, most=10).p10
        source = torch.ones(_COPIED[device.type] // 4, device=device)
        target = torch.empty_like(source)
        copy = time_repeatedly(lambda: target.copy_(source), clock, slice_s=slice_s, most=10).p10
    except torch.OutOfMemoryError:
        return None
    return Ceilings(
        flops_per_s=2 * side**3 / max(product, _LEAST_S), bytes_per_s=2 * source.nbytes / max(copy, _LEAST_S)
    )
