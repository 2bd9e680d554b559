"""Plans of several stages, cut by hand from plans of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from asa.ir.plan import DataDegree, Plan, ScheduleName, Stage, TensorDegree

Degrees = Callable[[int, int], tuple[int, int]]
"""(index of a component, width of its stage) to its (data, tensor) degrees."""


def data_parallel(_index: int, width: int) -> tuple[int, int]:
    """Every stage data parallel over all of its ranks."""
    return width, 1


def split_where_possible(_index: int, width: int) -> tuple[int, int]:
    """Every stage tensor parallel over all of its ranks."""
    return 1, width


def in_turn(index: int, width: int) -> tuple[int, int]:
    """Neighbours differ, also across stages; in every third component all ranks repeat the work."""
    return [(width, 1), (1, width), (1, 1)][index % 3]


def staged(
    plan: Plan, widths: Sequence[int], *, schedule: ScheduleName = "1f1b", microbatches: int = 4,
    degrees: Degrees = data_parallel, cuts: Sequence[int] = (), strategy: Callable[[int], str] = lambda _i: "replicate",
    checkpoint: Callable[[int], bool] = lambda _i: False,
) -> Plan:  # fmt: skip
    """``plan`` (one where splitting was tried: see ``hand_plan``) on stages of ``widths`` ranks.

    ``cuts`` are the first components of the stages but the first; evenly spread where left out. A component that runs
    whole in ``plan`` runs whole here.
    """
    count = len(plan.components)
    starts = [0, *(cuts or [round(count * i / len(widths)) for i in range(1, len(widths))])]
    stages, first = [], 0
    for width in widths:
        stages.append(Stage(ranks=tuple(range(first, first + width))))
        first += width
    components = []
    for i, c in enumerate(plan.components):
        stage = max(s for s, start in enumerate(starts) if start <= i)
        data, tensor = degrees(i, widths[stage])
        tensor = tensor if c.tensor.degree > 1 else 1
        components.append(
            replace(
                c,
                stage=stage,
                data=DataDegree(strategy=strategy(i), degree=data),  # type: ignore[arg-type]
                tensor=TensorDegree(strategy="tensor" if tensor > 1 else "none", degree=tensor),
                checkpoint=checkpoint(i),
            )
        )
    return replace(
        plan, gpus=first, components=tuple(components), stages=tuple(stages), schedule=schedule,
        num_microbatches=microbatches,
    )  # fmt: skip
