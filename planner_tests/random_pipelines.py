"""Random chains for the joint search: a formula of a few terms with noise, no cluster."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree
from asa.planner.stage.floor import LimitedStages, StageBounds
from asa.planner.stage.problem import Chain, Config, Edge
from asa.schedules import schedules

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")


class RandomPipelines:
    """``components`` on up to ``gpus`` ranks; ``speed`` of links in GiB/ms, ``memory`` in GiB of a rank."""

    likely_tight = False

    def __init__(
        self, seed: int, *, components: int, gpus: int, most: int, speed: float, memory: float, strategies: int = 4,
        checkpoint: bool = True, equal: bool = False, node: int = 8, noise: float = 0.3, sp: float = 1.0,
        sc: float = 1.2, names: tuple[str, ...] = ("1f1b", "gpipe"),
    ) -> None:  # fmt: skip
        rng = random.Random(seed)
        self.seed, self.gpus, self.most, self.speed, self.memory = seed, gpus, most, speed, memory
        self.names = tuple(f"c{i}" for i in range(components))
        self.schedules = {n: s for n, s in schedules().items() if n in names}
        self.strategies, self.checkpoint, self.node, self.noise, self.sp, self.sc = (
            STRATEGIES[:strategies], checkpoint, node, noise, sp, sc
        )  # fmt: skip

        def draw() -> tuple[float, float, float, float, float, int]:
            return (
                rng.uniform(5, 40), rng.choice([0.01, 0.1, 0.4]) * rng.random(), rng.uniform(0.2, 4),
                rng.uniform(0.05, 0.4), rng.uniform(0.02, 0.15), rng.randrange(10**9),
            )  # fmt: skip

        same = draw()
        self.parts = [same if equal and 0 < i < components - 1 else draw() for i in range(components)]
        self.release = [0]
        for i in range(1, components):
            self.release.append(rng.choice([self.release[-1], i - 1, i]) if not equal else i - 1)
        self._chains: dict[tuple[int, int], Chain | None] = {}
        self.asked = 0

    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({*range(1, min(8, self.gpus) + 1), *range(8, self.gpus + 1, 8), self.gpus}))

    def microbatches(self) -> tuple[int, ...]:
        return tuple(2**k for k in range(12) if 2**k <= self.most)

    def placed(self, offset: int, width: int) -> bool:
        inside = offset // self.node == (offset + width - 1) // self.node
        return inside or (offset % self.node == 0 and width % self.node == 0)

    def hop(self, offset: int) -> int:
        return int(offset % self.node == 0 and offset > 0)

    def crossing(self, cut: int) -> float:
        return self.parts[cut - 1][4]

    def transfer(self, cut: int, m: int, source: Layout, target: Layout, offset: int) -> tuple[float, float]:
        speed = self.speed / (8 if self.hop(offset) else 1)
        flows = min(source.data, target.data)
        one = 0.02 + self.crossing(cut) / m / flows / speed
        return one, one * 1.1

    def transfers(self, cuts: Any, m: int, source: Layout, target: Layout, offset: int) -> list[tuple[float, float]]:
        return [self.transfer(cut, m, source, target, offset) for cut in cuts]

    def fits(self, skeleton: Any, choices: Any) -> bool:
        return True

    def compute(self, width: int, m: int) -> list[float]:
        return [3 * (launch / 3 + c / m / width) * (1 - self.noise) for c, _, _, launch, _, _ in self.parts]

    def limited(self, width: int, m: int, in_flight: Any) -> list[LimitedStages]:
        chain = self.chain(width, m)
        assert chain is not None
        prices = (0.0, 0.3, 3.0, 30.0) if self.likely_tight else (0.0,)

        def bounds(flight: int, *times: Any) -> StageBounds:
            def least(some: Any, ms: Any, p: float, *, last: bool) -> float:
                held = [c.state + flight * c.activations + last * (c.gradients + c.transient) for c in some]
                return float(min(ms(c) + p * h for c, h in zip(some, held, strict=True)))

            def edge(row: Any, p: float, *, last: bool, whole: bool) -> float:
                some = [(x.cost if whole else x.forward + x.backward, x) for x in row.values()]
                held = [x.state + flight * x.activations + last * x.transient for _, x in some]
                return float(min(ms + p * h for (ms, _), h in zip(some, held, strict=True)))

            whole = len(times) > 1
            inner, last = (
                np.array([[least(c, ms, p, last=x) for c in chain.configs] for ms in times for p in prices])
                for x in (False, True)
            )
            first, behind = (
                np.array([[edge(e, p, last=x, whole=whole) for e in edges] for _ in times for p in prices])
                for edges, x in ((chain.inlets, False), (chain.outlets, True))
            )
            sums = np.concatenate([np.zeros((len(inner), 1)), inner.cumsum(axis=1)], axis=1)
            rents = np.tile(np.array(prices) * chain.capacity, len(times))
            return StageBounds(sums, first, last - inner + behind, rents)

        def in_backward(c: Config) -> float:
            return float(c.work - chain.saving * chain.sp * c.window)

        def in_exchange(c: Config) -> float:
            return float(c.work - chain.saving * chain.sc * (c.prompt + c.late))

        return [
            LimitedStages(bounds(f, lambda c: c.forward + c.backward), bounds(f, in_backward, in_exchange))
            for f in in_flight
        ]

    def chain(self, width: int, m: int) -> Chain | None:
        if (width, m) not in self._chains:
            self.asked += 1
            self._chains[width, m] = self._chain(width, m)
        return self._chains[width, m]

    def _chain(self, w: int, m: int) -> Chain:
        layouts = tuple(
            Layout(width=w, data=d, tensor=t)
            for d in range(1, w + 1) for t in range(1, w // d + 1) if w % (d * t) == 0
        )  # fmt: skip
        speed = self.speed if w <= self.node else self.speed / 8
        rows = []
        for c, parameters, saved, launch, output, seed in self.parts:
            rng = random.Random(seed * 1000 + w)
            row = []
            for number, x in enumerate(layouts):
                d, t = x.data, x.tensor
                noise = 1 - self.noise + self.noise * 2 * rng.random()
                compute = launch / 3 + c / m / (d * t) * noise
                talk = 0.0 if t == 1 else 0.02 + 2 * output / m / d / speed * rng.random()
                for s in self.strategies if d > 1 else STRATEGIES[:1]:
                    z = STRATEGIES.index(s)
                    gather = parameters / t * (d - 1) / d / speed if z == 3 else 0.0
                    sync = 0.0 if d == 1 else (0.05 + 2 * parameters / t * (d - 1) / d / speed) * (0.5 if z == 3 else 1)
                    late = sync * 0.7 if z == 0 else 0.0
                    share = [1, d, d, d][z]
                    for again in (False, True) if self.checkpoint else (False,):
                        forward = compute + talk + gather
                        backward = 2 * compute + talk + gather + (compute + talk if again else 0.0)
                        once = 8 * parameters / t / share / 1.5 + 0.01 + (sync * 0.3 if z in (1, 2) else 0.0)
                        held = parameters / t
                        kept = saved / m / d / t
                        out = min(kept, output / m / d)
                        grads = held / (d if z >= 2 else 1)
                        row.append(
                            Config(
                                layout=number,
                                data=DataDegree(strategy=s, degree=d),  # type: ignore[arg-type]
                                tensor=TensorDegree(strategy="none" if t == 1 else "tensor", degree=t),
                                checkpoint=again,
                                work=m * (forward + backward) + once + sync,
                                window=backward - talk - gather,
                                prompt=sync - late,
                                late=late,
                                state=held / (d if z == 3 else 1) + 2 * held / share + (grads if m > 1 else 0.0),
                                activations=out if again else kept,
                                gradients=0.0 if m > 1 else grads,
                                transient=0.1 * kept + (kept - out if again else 0.0) + (held if z == 3 else 0.0),
                                forward=forward,
                                backward=backward,
                                once=once,
                                bucket=0.0,
                            )
                        )
            rows.append(tuple(row))

        def edge(i: int, a: int, b: int) -> Edge:
            x, y = layouts[a], layouts[b]
            if a == b:
                return Edge(cost=0.0)
            out = self.parts[i][4]
            f = 0.01 + (0.0 if x.data == y.data else out / m / min(x.data, y.data) / speed)
            once = 0.02
            held = 0.0 if x.data == y.data else out / m / y.data
            return Edge(
                cost=m * 2.1 * f + once, forward=f, backward=1.1 * f, once=once, activations=held,
                transient=held, state=0.001,
            )  # fmt: skip

        def end(i: int, x: Layout) -> Edge:
            held = self.parts[max(0, i)][4] / m / x.data
            return Edge(cost=m * 0.03 + 0.01, forward=0.01, backward=0.02, once=0.01, activations=held, transient=held)

        count = range(len(self.parts))
        return Chain(
            width=w,
            num_microbatches=m,
            names=self.names,
            layouts=layouts,
            configs=tuple(rows),
            edges=tuple(
                {(a, b): edge(i, a, b) for a in range(len(layouts)) for b in range(len(layouts))}
                for i in count[:-1]
            ),
            inlets=tuple({k: end(i - 1, x) for k, x in enumerate(layouts)} for i in count),
            outlets=tuple({k: replace(end(i, x), activations=0.0) for k, x in enumerate(layouts)} for i in count),
            release=tuple(self.release),
            saving=max(0.0, 1 / self.sp + 1 / self.sc - 1),
            sp=self.sp,
            sc=self.sc,
            capacity=self.memory,
        )  # fmt: skip
