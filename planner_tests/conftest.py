"""One thread everywhere: a test process that computed with more could fork no rank that does."""

from __future__ import annotations

import gc
import os

# Before torch is imported by whichever test comes first, and without importing it here.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish() -> None:
    """What was imported stays: not looked through for garbage again and again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
