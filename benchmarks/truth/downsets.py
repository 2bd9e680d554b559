"""Downsets of a directed acyclic graph: the sets of nodes a pipeline can have behind a cut.

A downset holds, with a node, all of its predecessors. A stage of a pipeline is the difference of two nested downsets,
so a planner whose states are downsets may cut across skip connections, where a chain of components may not. A chain of
n nodes has n + 1 of them, two parallel chains of n have (n + 1)^2.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asa.errors import InvalidInputError

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

MOST = 100_000
"""More downsets than this are refused: the pairs of them would no longer fit into memory or patience."""


def topological(names: Sequence[str], edges: Sequence[tuple[int, int]], *, source: str) -> list[int]:
    """Node numbers in an order in which every edge points forward; among equals the lowest number first.

    Raises:
        InvalidInputError: the edges close a cycle; names a node on it.
    """
    before: list[set[int]] = [set() for _ in names]
    after: list[set[int]] = [set() for _ in names]
    for u, v in edges:
        before[v].add(u)
        after[u].add(v)
    missing = [len(b) for b in before]
    ready = [v for v, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        u = heapq.heappop(ready)
        order.append(u)
        for v in after[u]:
            missing[v] -= 1
            if missing[v] == 0:
                heapq.heappush(ready, v)
    if len(order) < len(names):
        at = next(v for v, count in enumerate(missing) if count > 0)
        trail: list[int] = []
        while at not in trail:  # every node left over has a predecessor that is left over
            trail.append(at)
            at = next(u for u in before[at] if missing[u] > 0)
        raise InvalidInputError(f"{source}: the graph has a cycle", where=f"node {names[at]}")
    return order


@dataclass(frozen=True)
class Downsets:
    """All downsets of a graph, smallest first: ``inside[i, v]`` says whether node v is in the i-th."""

    inside: NDArray[np.bool_]
    _words: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.inside)

    def sums(self, values: Sequence[float] | Floats) -> Floats:
        """Per downset the sum of ``values`` (one a node)."""
        found: Floats = self.inside.astype(np.float64) @ np.asarray(values, dtype=np.float64)
        return found

    def only(self, rows: Indices) -> Downsets:
        """Some of them, in the order of ``rows``."""
        return Downsets(self.inside[rows], self._words[rows])

    def below(self, i: int) -> Indices:
        """The downsets that are proper subsets of the i-th, smallest first."""
        outside = self._words[:i] & ~self._words[i]
        found: Indices = np.flatnonzero(~outside.any(axis=1))
        return found

    def holds(self, i: int, among: Indices) -> Indices:
        """Those of ``among`` that are proper supersets of the i-th."""
        lost = self._words[i] & ~self._words[among]
        found: Indices = among[~lost.any(axis=1) & (among != i)]
        return found


def downsets(nodes: int, edges: Sequence[tuple[int, int]], *, source: str, most: int = MOST) -> Downsets:
    """Every downset of an acyclic graph of ``nodes`` nodes, the empty one first and the full one last.

    Raises:
        InvalidInputError: there are more than ``most``.
    """
    needs = [0] * nodes
    after: list[list[int]] = [[] for _ in range(nodes)]
    for u, v in edges:
        needs[v] |= 1 << u
        after[u].append(v)
    roots = sum(1 << v for v in range(nodes) if needs[v] == 0)
    found = {0: roots}  # downset: nodes that may be added to it
    front = [0]
    while front:
        following: dict[int, int] = {}
        for mask in front:
            ready = found[mask]
            rest = ready
            while rest:
                bit = rest & -rest
                rest ^= bit
                grown = mask | bit
                if grown in following:
                    continue
                more = ready ^ bit
                for v in after[bit.bit_length() - 1]:
                    if needs[v] & grown == needs[v]:
                        more |= 1 << v
                following[grown] = more
        found.update(following)
        if len(found) > most:
            raise InvalidInputError(
                f"{source}: its {nodes} nodes can be cut in more than {most:,} ways; merge nodes that are never apart"
            )
        front = list(following)
    width = max(1, -(-nodes // 64))
    raw = b"".join(mask.to_bytes(8 * width, "little") for mask in found)
    words = np.frombuffer(raw, dtype="<u8").reshape(len(found), width)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :nodes]
    return Downsets(bits.astype(np.bool_), words.astype(np.uint64))
