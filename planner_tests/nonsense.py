"""Uninitialized memory that shows where it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """Context in which torch fills new uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.ones(1).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
