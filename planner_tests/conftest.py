"""One thread everywhere: a test process that computed with more could fork no rank that does."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

# Before torch is imported by whichever test comes first, and without importing it here.
os.environ["OMP_NUM_THREADS"] = "1"


LONGEST = (
    "test_equivalence.py",
    "test_train.py",
    "test_cli_real.py",
    "test_strategy_contract.py",
    "test_verify_plans.py",
    "test_zoo_models.py",
)
"""Files that take long, so that no process is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others as they were."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What was imported stays: not looked through for garbage again and again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _given_back() -> Iterator[None]:
    """Between files, memory: a process that has profiled keeps what it frees, and a file of large models frees much."""
    yield
    if "asa.launch.heap" in sys.modules:
        gc.collect()
        sys.modules["asa.launch.heap"].give_back_freed_memory()


def pytest_unconfigure() -> None:
    gc.unfreeze()
