"""Malleus's rule for slow devices, as a baseline: two integer programs over device speeds (arXiv 2410.13333).

A device whose rate (seconds over those of the fastest) is below 1.2 counts as fast. The first program cuts the model
into the stages of the plan in force so that the slowest stage, rate times seconds of its components, takes least; the
second shares the samples of a batch among replicas so that the slowest one, rate times samples, takes least. Links,
memory and the layouts of components are not looked at: replicas of the plan's own width, or stages as wide as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pulp

from asa.interfaces.executor import Placement
from asa.ir.plan import DataDegree, Plan, Stage, TensorDegree

SLOW = 1.2
"""Rate from which on a device counts as slow."""


def samples(rates: Sequence[float], batch: int) -> tuple[int, ...]:
    """How many of ``batch`` samples each replica takes, so that the largest product with its rate is least."""
    program = pulp.LpProblem("samples", pulp.LpMinimize)
    slowest = program.add_variable("slowest", lowBound=0)
    counts = [program.add_variable(f"n{i}", lowBound=0, cat="Integer") for i in range(len(rates))]
    program += slowest
    program += pulp.lpSum(counts) == batch
    for rate, count in zip(rates, counts, strict=True):
        program += rate * count <= slowest
    _solved(program)
    return tuple(round(c.value()) for c in counts)


def cut(rates: Sequence[float], seconds: Sequence[float]) -> tuple[int, ...]:
    """The stage of each component, in order, so that the slowest stage takes least."""
    stages = range(len(rates))
    program = pulp.LpProblem("cut", pulp.LpMinimize)
    slowest = program.add_variable("slowest", lowBound=0)
    # behind[s][c]: component c lies in stage s or a later one.
    behind = [[program.add_variable(f"b{s}_{c}", cat="Binary") for c in range(len(seconds))] for s in stages]
    program += slowest
    for c in range(len(seconds)):
        program += behind[0][c] == 1
        for s in stages[1:]:
            program += behind[s][c] <= behind[s - 1][c]
            if c:
                program += behind[s][c] >= behind[s][c - 1]
    for s in stages:
        later = behind[s + 1] if s + 1 < len(rates) else None
        inside = [behind[s][c] - (later[c] if later else 0) for c in range(len(seconds))]
        program += pulp.lpSum(inside) >= 1
        program += rates[s] * pulp.lpSum(t * x for t, x in zip(seconds, inside, strict=True)) <= slowest
    _solved(program)
    return tuple(sum(round(behind[s][c].value()) for s in stages) - 1 for c in range(len(seconds)))


def _solved(program: pulp.LpProblem) -> None:
    if program.solve(pulp.HiGHS(msg=False, timeLimit=10)) != pulp.LpStatusOptimal:
        raise RuntimeError(f"{program.name}: {pulp.LpStatus[program.status]}")


def answers(placement: Placement, rates: Sequence[float], seconds: Sequence[float]) -> Iterator[Placement]:
    """The plan in force, and what the rule makes of it where some process is slow; ``rates`` by process, ``seconds`` by
    component. They are not sure to be runnable: whoever prices them finds out."""
    yield placement
    fast = min(rates)
    ratio = [r / fast if r / fast >= SLOW else 1.0 for r in rates]
    if max(ratio) == 1:
        return
    order = sorted(range(len(rates)), key=lambda p: (ratio[p], p))
    shares = samples([ratio[p] for p in order], placement.plan.global_batch)
    working = [i for i, n in enumerate(shares) if n]
    yield Placement(
        plan=_replicas(placement.plan, [shares[i] for i in working]), processes=tuple(order[i] for i in working)
    )
    quick = [p for p in order if ratio[p] == 1]
    yield Placement(plan=_replicas(placement.plan, [1] * len(quick)), processes=tuple(quick))
    if len(placement.plan.stages) > 1:
        slowest = [max(ratio[placement.processes[r]] for r in s.ranks) for s in placement.plan.stages]
        stages = cut(slowest, seconds)
        there = {c.stage: c for c in placement.plan.components}  # a stage may have more ranks than its neighbour
        moved = tuple(
            c if c.stage == s else replace(c, stage=s, data=there[s].data, tensor=there[s].tensor)
            for c, s in zip(placement.plan.components, stages, strict=True)
        )
        yield replace(placement, plan=replace(placement.plan, components=moved))


def _replicas(plan: Plan, shares: Sequence[int]) -> Plan:
    """``plan``'s model on so many ranks, all of it on each, batches shared as given."""
    ranks, common = len(shares), math.gcd(*shares)
    weights = tuple(n // common for n in shares)
    one = DataDegree(strategy="replicate", degree=ranks), TensorDegree(strategy="none", degree=1)
    return replace(
        plan,
        components=tuple(replace(c, stage=0, data=one[0], tensor=one[1]) for c in plan.components),
        stages=(Stage(ranks=tuple(range(ranks)), weights=None if set(weights) == {1} else weights),),
        schedule="none",
        num_microbatches=1,
        strategy="ddp" if ranks > 1 else "single",
    )
