"""Is the right thing named, soon, and nothing where nothing is slow? The loop's own detection on disturbed traces.

    python benchmarks/detect.py [--cases 100] [--windows 1000] [--seed 0] [-o benchmarks/records/detect.json]

A trace is a run on the cost model as the world (ResNet-50 at batch 64 on two and four gloo ranks), with noise of the
kind that real runs on shared cores show: steps vary by 5 %, figures of ranks and links by 3 %, and one step in twenty
takes half as long again. It is looked at every five steps. After a drawn step one of five things begins: a *slow core*
(a drawn rank takes 1.3 to 4 times as long), *slow links* (10 to 40 times), a *throttle* (a drawn rank runs in a drawn
part of every 10 ms, 0.3 to 0.75, and each step ends somewhere in a period), a *data stall* (steps wait for input 0.3 to
2 steps long), or *nothing*. Named right: the cause and the rank are said within twenty steps, and nothing else is.
Where links are disturbed by less than a step shows, nothing needs to be said: they are drawn so that it is a fifth
slower at least. *Clean windows*: looks at traces on which nothing happens; any finding is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from simulated_world import Noise, World

from asa.errors import InfeasibleError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, plan
from asa.scheduler import Model, adapt
from asa.scheduler.costs import Slowness
from asa.strategies import offered

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("slow core", "slow links", "throttle", "data stall", "nothing")
WINDOW, WITHIN, EPOCH = 5, 20, 100
PERIOD_S = 0.010
NOISE = Noise(step=0.05, own=0.03, tails=0.05, tail=1.5)
LEAST = 1.2
"""By how many times slow links make a step longer, at least."""


def _keep(*_: Any) -> Plan:
    raise InfeasibleError("only what is found matters here")


@cache
def _setting(ranks: int) -> tuple[Model, Plan]:
    profile = codec.load(Profile, ROOT / "profiles" / "resnet50.cpu.fp32.json")
    cluster = codec.load(Cluster, ROOT / "profiles" / f"cluster.local-gloo-{ranks}.json")
    first = plan(profile, cluster, offered(), Request(gpus=ranks, global_batch=64, strategies=("ddp",)))[0]
    return Model(profile=profile, cluster=cluster, strategies=offered(), solve=_keep), first


class Trace(World):
    """``stall``: steps that every step waits for its input from ``begins`` on; ``throttled``: the part of a period that
    a rank runs in from then on."""

    begins, stall, throttled = 10**9, 0.0, 1.0

    def _tail(self) -> float:
        tail = super()._tail()
        if self.throttled < 1 and self.step >= self.begins:
            step_s = self._truth(self._placement, self.step)[0]
            tail *= 1 + self._random.uniform(-0.5, 0.5) * (1 - self.throttled) * PERIOD_S / step_s
        return tail

    def _measured(self, steps: int) -> Measurements:
        found = super()._measured(steps)
        late = self.stall * found.step_time.median if self.step > self.begins else 0.0
        ranks = tuple(replace(r, data_wait_s=late * self._off()) for r in found.per_rank)
        return replace(found, data_wait_s=late, per_rank=ranks)


def _trace(draw: random.Random, kind: str, ranks: int) -> tuple[Trace, tuple[str, int | None] | None]:
    """A trace, and the cause that is to be named: which, and where."""
    model, first = _setting(ranks)
    rank, begins = draw.randrange(ranks), WINDOW * draw.randint(6, 20) + draw.randrange(WINDOW)
    slow = Slowness(common=0.0, ranks=(0.0,) * ranks, levels=(0.0,) * len(model.cluster.levels))
    cause: tuple[str, int | None] | None = None
    part = draw.uniform(0.3, 0.75) if kind == "throttle" else 1.0
    if kind in ("slow core", "throttle"):
        by = draw.uniform(1.3, 4.0) if kind == "slow core" else 1 / part
        slow, cause = (
            replace(slow, ranks=tuple(math.log(by) if r == rank else 0.0 for r in range(ranks))),
            ("compute", rank),
        )
    elif kind == "slow links":
        slow, cause = replace(slow, levels=(math.log(draw.uniform(10.0, 40.0)),)), ("link", 0)
    elif kind == "data stall":
        cause = ("data", None)
    clean, worse = (model.profile, model.cluster), model.corrected(slow, range(ranks))
    made = Trace(
        first, lambda step: worse if step >= begins else clean, offered(), processes=ranks, steps=EPOCH, window=WINDOW,
        noise=NOISE, seed=draw.randrange(2**31),
    )  # fmt: skip
    made.begins, made.throttled = begins, part
    made.stall = draw.uniform(0.3, 2.0) if kind == "data stall" else 0.0
    return made, cause


def _found(trace: Trace, ranks: int, epochs: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for _ in adapt(trace, range(epochs), events.append, model=_setting(ranks)[0]):
        pass
    return [e for e in events if e["event"] == "finding"]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    draw, began = random.Random(args.seed), time.monotonic()
    named: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    after: list[int] = []
    for i in range(args.cases):
        kind, ranks = KINDS[i % len(KINDS)], (2, 4)[i // len(KINDS) % 2]
        trace, cause = _trace(draw, kind, ranks)
        if kind == "slow links":
            while _longer(trace) < LEAST:
                trace, cause = _trace(draw, kind, ranks)
        found = _found(trace, ranks, 2)
        right = [e for e in found if (e["cause"], e["where"]) == cause and e["step"] >= trace.begins]
        others = [e for e in found if (e["cause"], e["where"]) != cause]
        steps = right[0]["step"] - trace.begins if right else None
        good = not others and (cause is None or (steps is not None and steps <= WITHIN))
        named[kind] += good
        after += [] if steps is None else [steps]
        if not good:
            wrong.append({"case": i, "kind": kind, "ranks": ranks, "begins": trace.begins,
                          "found": [(e["step"], e["line"]) for e in found]})  # fmt: skip
            print(wrong[-1], flush=True)
    alarms: list[str] = []
    looks = 0
    while looks < args.windows:
        ranks = (2, 4)[(looks // 200 + args.seed) % 2]
        alarms += [e["line"] for e in _found(_trace(draw, "nothing", ranks)[0], ranks, 10)]
        looks += 10 * EPOCH // WINDOW
    record = {
        "seed": args.seed, "cases": args.cases, "named_right": sum(named.values()), "by_kind": dict(named),
        "steps_until_named": {"median": statistics.median(after) if after else None, "most": max(after, default=None)},
        "clean_windows": looks, "false_alarms": alarms, "wrong": wrong, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def _longer(trace: Trace) -> float:
    """By how many times a step takes longer once it is disturbed."""
    now = trace._placement
    return trace.true_step_s(now, trace.begins) / trace.true_step_s(now, 0)


if __name__ == "__main__":
    main()
