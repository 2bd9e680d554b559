"""Prices of all boundaries between two components: from every layout of the first to every layout of the second.

Messages per byte of the tensor do not depend on the number of microbatches, so they are listed once. Many pairs of
layouts send the same messages; each message is priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.memory.peak import margin
from asa.cost.traffic.collectives import Links
from asa.cost.traffic.launching import launched
from asa.ir.codec import hashed, noun
from asa.ir.graph import Component
from asa.ir.layout import Boundary, Layout, largest_shard
from asa.ir.traffic import Collective, CollectiveOp, Phase

_PHASES: tuple[Phase, ...] = ("forward", "backward")


@hashed
@noun
class Ends:
    """The layout rules of the two sides of a boundary, for any layouts: fields of :class:`asa.ir.layout.Boundary`."""

    exit_partial: bool = False
    entry_partial: bool = False
    exit_tokens: int = 0
    entry_tokens: int = 0

    @staticmethod
    def between(before: Component | None, after: Component | None) -> Ends:
        """The rules of the output of ``before`` and the input of ``after``; None stands for a whole tensor."""
        source = before.split if before is not None else None
        target = after.split if after is not None else None
        return Ends(
            exit_partial=source is not None and source.exit_partial,
            entry_partial=target is not None and target.entry_partial,
            exit_tokens=source.sequence.exit_tokens if source and source.sequence else 0,
            entry_tokens=target.sequence.tokens if target and target.sequence else 0,
        )

    def boundary(self, source: Layout, target: Layout) -> Boundary:
        """The boundary between two layouts."""
        return Boundary(
            source=source, target=target, exit_partial=self.exit_partial, entry_partial=self.entry_partial,
            exit_tokens=self.exit_tokens, entry_tokens=self.entry_tokens,
        )  # fmt: skip


@dataclass
class Crossed:
    """Prices of boundaries: arrays of shape (size, pair of layouts), in seconds of one microbatch and in bytes. For
    each pair, ``moved`` says whether the layouts differ; ``launched`` counts collectives in forward and in backward."""

    forward: Any
    backward: Any
    moved: Any
    activations: Any
    transient: Any
    launched: tuple[Any, Any]


class Crossings:
    """Boundaries that are priced together. ``pairs``: for each pair of layouts, the boundary and its traffic per byte
    of the whole microbatch's tensor."""

    def __init__(self, pairs: Sequence[tuple[Boundary, Sequence[Collective]]]) -> None:
        self._count = len(pairs)
        numbers: dict[tuple[CollectiveOp, float, int, int], int] = {}
        entries: dict[Phase, list[tuple[int, int]]] = {p: [] for p in _PHASES}
        for k, (_, traffic) in enumerate(pairs):
            for c in traffic:
                message = (c.op, c.bytes, c.ranks, c.stride)
                entries[c.phase].append((k, numbers.setdefault(message, len(numbers))))
        self._messages = list(numbers)
        self._entries = {p: np.array(entries[p], dtype=np.int64).reshape(-1, 2).T for p in _PHASES}
        forward, backward = (np.array([launched(t, p) for _, t in pairs], dtype=np.int64) for p in _PHASES)
        self._launched: tuple[Any, Any] = (forward, backward)
        self._gathered = np.array(
            [sum(c.bytes for c in t if c.op == "all_gather" and c.phase == "backward") for _, t in pairs], dtype=float
        )
        self._moved = np.array([b.source != b.target for b, _ in pairs])
        tensors = [_new_tensor(b) for b, _ in pairs]
        self._keeps, self._shard, self._tokens = (np.array(x, dtype=float) for x in zip(*tensors, strict=True))
        self._targets = list(dict.fromkeys(b.target for b, _ in pairs))
        self._target = np.array([self._targets.index(b.target) for b, _ in pairs])

    def priced(self, links: Links, sizes: Sequence[float], part: Callable[[float, Layout], float]) -> Crossed:
        """Prices for tensors of ``sizes`` bytes, shape (size, pair). ``part(size, layout)``: bytes that a rank holds of
        such a tensor."""
        seconds = np.array(
            [[links.time(op, size * b, ranks, stride) for op, b, ranks, stride in self._messages] for size in sizes]
        )
        phase_s = np.zeros((len(_PHASES), len(sizes), self._count))
        for phase, into in zip(_PHASES, phase_s, strict=True):
            pair, which = self._entries[phase]
            for row, message_s in zip(into, seconds, strict=True) if len(pair) else ():
                row[:] = np.bincount(pair, message_s[which], self._count)
        size = np.array(sizes)[:, None]
        bytes_held = np.array([[part(s, x) for x in self._targets] for s in sizes])[:, self._target]
        return Crossed(
            forward=phase_s[0],
            backward=phase_s[1],
            moved=self._moved,
            activations=self._keeps * bytes_held * self._shard / self._tokens * margin(),
            transient=size * self._gathered * margin(),
            launched=self._launched,
        )


def _new_tensor(boundary: Boundary) -> tuple[bool, int, int]:
    """Whether the boundary makes a new tensor, which the target keeps; the rank's tokens of it, and all its tokens."""
    source, target = boundary.source, boundary.target
    if boundary.cuts_tokens:
        tokens = boundary.entry_tokens
        return True, largest_shard(tokens, target.tensor), tokens
    return source.data != target.data or boundary.gathers_tokens, 1, 1
