"""One thread everywhere: a test process that computed with more could fork no rank that does."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

# Before torch is imported by whichever test comes first, and without importing it here.
os.environ["OMP_NUM_THREADS"] = "1"

from asa.planner import clock

clock.PATIENCE = 1e9
"""Searches count their own work alone: what others have of the cores meanwhile would end them early."""

with suppress(ModuleNotFoundError):  # tests of GPUs need no more than pytest
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("the same everywhere", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("the same everywhere")


LONGEST = (
    "cli_real", "consistency_jobs", "programs_further", "faults", "recovery", "equivalence", "programs_public",
    "losses", "tracing", "train", "verify_training", "consistency_returns", "adapt_laws", "standin", "docs_commands",
    "consistency_endings", "programs_optimizers", "zero", "planner_golden", "programs_habits", "pipeline",
    "planner_joint", "programs_gradients", "idle", "benchmarks", "api_loop", "programs_tools", "api_job",
    "zoo_models", "consistency_groups", "programs_unseen", "programs_data", "programs_fuzz", "cost_units",
    "strategy_contract", "planner_weights", "api_norms", "api_odd", "attack", "programs_whole", "programs_compared",
    "headstart", "pipeline_runs", "ending", "precision", "programs_losses", "programs_inputs", "programs_published",
    "launch", "hsdp", "recompute", "emulation", "observe", "migration", "planner_memory", "planner_fuzz",
)  # fmt: skip
"""Files that take long, so that no process is left alone with one of them at the end. Those whose tests wait are among
those that compute."""
_PLACES = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, in that order, the others as they were."""
    items.sort(key=lambda item: _PLACES.get(item.path.name, len(_PLACES)))


def pytest_collection_finish() -> None:
    """What was imported stays: not looked through for garbage again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _by_itself() -> Iterator[None]:
    """A test draws the same numbers, and finds no fault armed, whatever ran before it in its process: that differs from
    run to run."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)
    yield
    if "asa.launch.faults" in sys.modules:
        sys.modules["asa.launch.faults"].arm("")


@pytest.fixture(autouse=True, scope="module")
def _given_back() -> Iterator[None]:
    """Between files, memory: a process that has profiled keeps what it frees, and a file of large models frees much.
    What is left then stays, and is not looked through again."""
    yield
    if "asa.launch.heap" in sys.modules:
        sys.modules["asa.launch.heap"].give_back_freed_memory()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
