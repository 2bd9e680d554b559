"""A fixed piece of computing, by whose time an idle device shows how fast it is."""

from __future__ import annotations

import time

import torch

_SIZE = {"cpu": 256, "cuda": 4096}
_TIMES = {"cpu": 48, "cuda": 8}
"""Matrix products: tens of milliseconds, so that whoever else has the core gets his turns within."""


def probe(device: torch.device) -> float:
    """Seconds of some matrix products of one size on ``device``, after one that warms it up."""
    size = _SIZE[device.type]
    x = torch.full((size, size), 1 / size, device=device)
    y = torch.empty_like(x)
    torch.mm(x, x, out=y)
    _done(device)
    began = time.perf_counter()
    for _ in range(_TIMES[device.type]):
        torch.mm(x, x, out=y)
    _done(device)
    return time.perf_counter() - began


def _done(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
