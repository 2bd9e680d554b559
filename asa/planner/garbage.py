"""Switches garbage collection off while a plan is made.

A search makes hundreds of thousands of objects that stay, and hardly any that only the collector could free. Each pass
over them takes as long as pricing all plans with one number of microbatches. In a forked process it also writes to
every shared page, which copies it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off inside, and on again afterwards if it was on."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
