"""Every pair of neighbouring configurations once: what their plan declares, and what its ranks were seen to move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from asa.executor.model.materialize import materialize
from asa.executor.model.step import played
from asa.executor.training.optimizer import build_optimizer
from asa.ir.graph import LayerGraph
from asa.ir.layout import Boundary, Layout
from asa.ir.plan import DataDegree, Plan, TensorDegree
from asa.planner.space.space import layouts
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from planner_tests.hand_plans import hand_plan, traced, uniform
from planner_tests.test_strategy_contract import OPS, Recorder

BATCH, WIDTH, CLASSES = 16, 16, 16
INPUT = (WIDTH,)
STRATEGIES = offered()


@dataclass(frozen=True)
class Configuration:
    """How a component is spread over the ranks of a stage."""

    layout: Layout
    data: DataDegree

    @property
    def text(self) -> str:
        """In a few characters."""
        return f"{self.data.text}, tensor x{self.layout.tensor}"


def configurations(width: int) -> list[Configuration]:
    """All of a stage of ``width`` ranks; hsdp cuts state over half of a data group."""
    found = []
    for layout in layouts(width):
        for name in STRATEGIES.data:
            if layout.data == 1 and name != "replicate":
                continue
            if name != "hsdp":
                found.append(Configuration(layout, DataDegree(strategy=name, degree=layout.data)))  # type: ignore[arg-type]
            elif layout.data >= 4:
                choice = DataDegree(strategy="hsdp", degree=layout.data, shards=layout.data // 2)
                found.append(Configuration(layout, choice))
    return found


def every_pair(configurations: Sequence[Configuration]) -> list[Configuration]:
    """A walk in which every ordered pair, of equals too, are neighbours exactly once (Hierholzer 1873)."""
    count = len(configurations)
    left = [list(range(count)) for _ in range(count)]
    stack, walk = [0], []
    while stack:
        at = stack[-1]
        if left[at]:
            stack.append(left[at].pop())
        else:
            walk.append(stack.pop())
    return [configurations[i] for i in reversed(walk)]


def stretches(width: int, components: int) -> list[list[Configuration]]:
    """The walk of a stage of ``width`` ranks in overlapping parts of up to so many components."""
    walk = every_pair(configurations(width))
    return [walk[i : i + components] for i in range(0, len(walk) - 1, components - 1)]


def chain(components: int) -> nn.Module:
    """Equal components that may be split in any way, with weights that depend on nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(components))
        )


@cache
def _base(components: int) -> tuple[Plan, LayerGraph]:
    model = chain(components)
    made = hand_plan(model, 2, uniform(1, 2), input_shape=INPUT, num_classes=CLASSES, global_batch=BATCH)
    graph = layer_graph(traced(chain(components), INPUT), model="chain", input_shape=INPUT, num_classes=CLASSES)
    assert len(made.components) == components == len(graph)
    return made, graph


def graph_of(components: int) -> LayerGraph:
    """The facts of a :func:`chain`."""
    return _base(components)[1]


def plan_of(stretch: Sequence[Configuration]) -> Plan:
    """One stage in which component i has configuration i."""
    base, _ = _base(len(stretch))
    width = stretch[0].layout.width
    components = tuple(
        replace(
            c,
            data=x.data,
            tensor=TensorDegree(strategy="tensor" if x.layout.tensor > 1 else "none", degree=x.layout.tensor),
        )
        for c, x in zip(base.components, stretch, strict=True)
    )
    ranks = replace(base.stages[0], ranks=tuple(range(width)))
    return replace(base, gpus=width, components=components, stages=(ranks,))


def declared(stretch: Sequence[Configuration]) -> Counter[str]:
    """Bytes by operation that the pages and boundaries of a stretch say a rank will see in a step."""
    graph = graph_of(len(stretch))
    found: Counter[str] = Counter()
    partial = []
    for component, x in zip(graph.components, stretch, strict=True):
        tensor = STRATEGIES.tensor["tensor" if x.layout.tensor > 1 else "none"]
        share = tensor.share(component, x.layout.tensor)
        moved = [
            *tensor.traffic(component, x.layout.tensor, BATCH / x.layout.data),
            *STRATEGIES.data[x.data.strategy].of(x.data).traffic(share, x.layout.data, x.layout.inner),
        ]
        for c in moved:
            found[c.op] += round(c.bytes)
        split = component.split if x.layout.tensor > 1 else None
        partial.append((split.entry_partial, split.exit_partial) if split else (False, False))
    size = graph.components[0].output_bytes_per_sample * BATCH
    ends = [x.layout for x in stretch]
    ends.append(replace(ends[-1], tensor=1))
    partial.append((False, False))
    for i, (a, b) in enumerate(pairwise(ends)):
        crossing = Boundary(source=a, target=b, exit_partial=partial[i][1], entry_partial=partial[i + 1][0])
        for c in crossing.traffic(size):
            found[c.op] += round(c.bytes)
    return +found


def intercepted(rank: int, plans: Sequence[Plan], components: Sequence[int]) -> list[dict[str, int]]:
    """The same as the ranks' collectives have it, in the third step of each plan."""
    OPS["broadcast_"] = "broadcast"
    return [_third_step(rank, plan, count) for plan, count in zip(plans, components, strict=True)]


def _third_step(rank: int, plan: Plan, components: int) -> dict[str, int]:
    model = materialize(
        plan, chain(components), torch.zeros((2, *INPUT)), rank=rank, strategies=STRATEGIES, device=torch.device("cpu")
    )
    optimizer = build_optimizer("sgd", model.updated, lr=0.01)
    model.train()
    recorder, x = Recorder(), torch.randn((BATCH, *INPUT))
    labels: Any = torch.zeros(BATCH, dtype=torch.int64)
    for step in range(3):
        with recorder:
            recorder.seen.clear()
            model.zero_grad()
            played(model, torch.arange(BATCH), step, lambda rows: x[rows], lambda rows: labels[rows])
            optimizer.step()
            model.share_updates()
    model.close()
    return dict(recorder.seen)
