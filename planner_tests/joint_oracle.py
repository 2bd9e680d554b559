"""Brute force over all plans of several stages, with its own arithmetic: it shares no code with the search."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, NamedTuple


class Skeleton(NamedTuple):
    """What ``fits`` is asked of, beside the choices."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    num_microbatches: int
    schedule: str


def clock(
    times: list[tuple[float, float, float, float]], moves: list[tuple[float, float]], orders: Any, m: int
) -> float:
    """A step by fixed-point iteration over events: (forward, backward, longer, after) per stage."""
    p = len(times)
    end: dict[tuple[int, str, int], float] = {}
    sent: dict[tuple[int, str, int], float] = {}
    pending = [list(order) for order in orders]
    now, wire = [0.0] * p, {}
    while any(pending):
        for s in range(p):
            if not pending[s]:
                continue
            action = pending[s][0]
            key = (s, action.direction, action.microbatch)
            if action.direction == "forward":
                ready = 0.0 if s == 0 else sent.get((s - 1, "forward", action.microbatch))
                takes = times[s][0]
            else:
                ready = 0.0 if s == p - 1 else sent.get((s + 1, "backward", action.microbatch))
                takes = times[s][1] + (times[s][2] if len(pending[s]) == 1 else 0.0)
            if ready is None:
                continue
            pending[s].pop(0)
            now[s] = end[key] = max(now[s], ready) + takes
            to = s + 1 if action.direction == "forward" else s - 1
            if 0 <= to < p:
                move = moves[s][0] if to > s else moves[to][1]
                wire[s, to] = max(wire.get((s, to), 0.0), now[s]) + move
                sent[key] = wire[s, to]
    return max(n + t[3] for n, t in zip(now, times, strict=True))


def stage(
    chain: Any, a: int, b: int, flight: int
) -> list[tuple[tuple[float, float, float, float], int, int, tuple[int, ...]]]:
    """Every way to run components a to b - 1 that fits: times, data degrees at the ends, and the choice."""
    found = []
    sp, sc = chain.sp, chain.sc
    for choice in product(*(range(len(chain.configs[i])) for i in range(a, b))):
        c = [chain.configs[a + j][k] for j, k in enumerate(choice)]
        joints = [chain.inlets[a].get(c[0].layout)]
        joints += [chain.edges[a + j - 1].get((c[j - 1].layout, c[j].layout)) for j in range(1, b - a)]
        out = chain.outlets[b - 1].get(c[-1].layout)
        if out is None or any(e is None for e in joints):
            continue
        everything = [*c, *joints, out]
        forward, backward = sum(x.forward for x in everything), sum(x.backward for x in everything)
        resident = sum(x.state for x in everything)
        live = [
            c[j].activations + joints[j].activations + (out.activations if j == b - a - 1 else 0) for j in range(b - a)
        ]
        peak = 0.0
        for j in range(b - a):
            here = resident + (flight - 1) * sum(live) + sum(live[: j + 1]) + sum(x.gradients for x in c[j:])
            here += c[j].transient + joints[j].transient + (out.transient if j == b - a - 1 else 0)
            peak = max(peak, here)
        if peak > chain.capacity + 1e-9:
            continue
        sync = sum(x.prompt + x.late for x in c)
        both = float("inf")
        for k in range(b - a):
            window = sum(x.window for x in c[:k])
            later = sum(x.prompt for x in c[k + 1 :])
            later += sum(x.late for j, x in enumerate(c) if max(0, chain.release[a + j] - a) > k)
            both = min(both, sp * window + sc * later)
        if chain.saving <= 0:
            both = 0.0
        longer = sum(x.bucket for x in c) + both * (1 - 1 / sp)
        once = sum(x.once for x in everything) + sync - chain.saving * both
        found.append(
            (
                (forward, backward, longer, max(0.0, once - longer)),
                chain.layouts[c[0].layout],
                chain.layouts[c[-1].layout],
                choice,
            )
        )
    return found


def least(way: Any, m: int) -> float:
    """Ms that a stage run in this way takes if it never waits: no step of a plan with it is shorter."""
    forward, backward, longer, after = way[0]
    return m * (forward + backward) + longer + after


def best(pipelines: Any) -> float:
    """Ms of the fastest plan of two or more stages. A stage that alone takes as long as a known plan is left out."""
    n, lowest = len(pipelines.names), float("inf")
    for m in pipelines.microbatches():
        for name, schedule in pipelines.schedules.items():
            for p in range(2, min(n, pipelines.gpus) + 1):
                orders = [schedule.order(s, p, m) for s in range(p)]
                ways: dict[Any, Any] = {}
                for widths in product(pipelines.widths(), repeat=p):
                    offsets = [sum(widths[:s]) for s in range(p + 1)]
                    if offsets[-1] > pipelines.gpus:
                        continue
                    if not all(pipelines.placed(o, w) for o, w in zip(offsets, widths, strict=False)):
                        continue
                    for cuts in combinations(range(1, n), p - 1):
                        at = [0, *cuts, n]
                        options = []
                        for s in range(p):
                            key = (widths[s], at[s], at[s + 1], schedule.in_flight(s, p, m))
                            if key not in ways:
                                found = stage(pipelines.chain(widths[s], m), *key[1:])
                                ways[key] = sorted(found, key=lambda way: least(way, m))
                            options.append([way for way in ways[key] if least(way, m) < lowest])
                        for picked in product(*options):
                            if max(least(way, m) for way in picked) >= lowest:
                                continue
                            moves = [
                                pipelines.transfers((at[s],), m, picked[s - 1][2], picked[s][1], offsets[s])[0]
                                for s in range(1, p)
                            ]
                            value = clock([x[0] for x in picked], moves, orders, m)
                            skeleton = Skeleton(tuple(at[:-1]), tuple(widths), m, name)
                            if value < lowest and pipelines.fits(skeleton, tuple(x[3] for x in picked)):
                                lowest = value
    return lowest
