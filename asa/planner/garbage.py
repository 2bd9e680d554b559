"""Garbage collection is off while a plan is made.

A search makes hundreds of thousands of objects that stay, and hardly any that only the collector could free. Each pass
over them takes as long as pricing a number of microbatches, and in a forked process it writes to every page that the
two share.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the collector off inside, if it was on."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
