"""Random numeric problems for the solvers, small enough for brute force."""

from __future__ import annotations

import random
from math import prod

from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree
from asa.planner.stage import exhaustive
from asa.planner.stage.problem import Config, Edge, Problem

LAYOUTS = (
    Layout(width=4, data=4, tensor=1),
    Layout(width=4, data=2, tensor=2),
    Layout(width=4, data=1, tensor=4),
    Layout(width=4, data=1, tensor=1),
)


def draw(rng: random.Random, *, components: int, configs: int, most: int | None = None, tight: bool = False) -> Problem:
    """A problem of that many components, each with up to that many configurations, and ``most`` choices in all."""
    release: list[int] = [0]
    for i in range(1, components):
        release.append(rng.choice([release[-1], i - 1, i]))
    found = []
    for i in range(components):
        row = []
        left = configs if most is None else min(configs, max(1, most // prod(len(r) for r in found)))
        for _ in range(rng.randint(1, left)):
            prompt = rng.choice([0.0, rng.uniform(0, 4)])
            late = rng.choice([0.0, rng.uniform(0, 4)]) if release[i] < i else 0.0
            window = rng.uniform(0, 4)
            row.append(
                Config(
                    layout=rng.randrange(len(LAYOUTS)),
                    data=DataDegree(strategy="replicate", degree=1),
                    tensor=TensorDegree(strategy="none", degree=1),
                    work=window + prompt + late + rng.uniform(0, 6),
                    window=window,
                    prompt=prompt,
                    late=late,
                    state=rng.uniform(0, 2),
                    activations=rng.uniform(0, 2),
                    gradients=rng.uniform(0, 1),
                    transient=rng.uniform(0, 1),
                )
            )
        found.append(tuple(row))
    edges = tuple(
        {
            (a, b): Edge(cost=0.0 if a == b else rng.uniform(0, 3), activations=0.0 if a == b else rng.uniform(0, 0.5),
                         transient=0.0 if a == b else rng.uniform(0, 0.5),
                         state=0.0 if a == b else rng.choice([0.0, rng.uniform(0, 0.5)]))
            for a in range(len(LAYOUTS)) for b in range(len(LAYOUTS))
        }
        for _ in range(components - 1)
    )  # fmt: skip
    sp, sc = rng.choice([(1.0, 1.0), (1.2, 1.1), (1.4, 1.6)])
    problem = Problem(
        width=4,
        num_microbatches=1,
        names=tuple(f"c{i}" for i in range(components)),
        layouts=LAYOUTS,
        configs=tuple(found),
        edges=edges,
        release=tuple(release),
        saving=max(0.0, 1 / sp + 1 / sc - 1),
        sp=sp,
        sc=sc,
        capacity=float("inf"),
    )
    if not tight:
        return problem
    from dataclasses import replace

    free = exhaustive.solve(problem)
    assert free.choice is not None
    return replace(problem, capacity=exhaustive.peak(problem, free.choice) * rng.uniform(0.6, 1.05))
