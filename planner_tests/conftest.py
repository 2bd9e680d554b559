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
    "test_equivalence.py", "test_docs_commands.py", "test_pipeline.py", "test_cli_real.py", "test_zero.py",
    "test_planner_joint.py", "test_hsdp.py", "test_planner_golden.py", "test_planner_fuzz.py", "test_recompute.py",
    "test_planner_memory.py", "test_pipeline_runs.py", "test_losses.py", "test_tracing.py", "test_recovery.py",
    "test_verify_training.py", "test_emulation.py", "test_faults.py", "test_cost_units.py", "test_migration.py",
    "test_consistency_returns.py", "test_consistency_jobs.py", "test_observe.py", "test_strategy_contract.py",
    "test_train.py", "test_verify_plans.py", "test_zoo_models.py", "test_programs_fuzz.py", "test_standin.py",
    "test_programs_optimizers.py",
)  # fmt: skip
"""Files that take long, so that no process is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others as they were."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What was imported stays: not looked through for garbage again and again."""
    gc.freeze()


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
