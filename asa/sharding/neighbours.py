"""Weights gathered one component ahead where one segment ends and the next begins.

Inside of a segment stock FSDP2 does that by itself: its units have one root. Between segments, each of which has a root
of its own or none, nobody would; the price of a plan counts on it (:mod:`asa.cost.traffic.prefetch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asa.sharding.sharded import GATHERED_ONCE


class GatherAhead:
    """Called, begins to gather the weights of ``unit``, which waits for them itself when it runs; takes whatever a hook
    is called with. Does nothing before :meth:`allow`: FSDP sets a unit up when it first runs."""

    def __init__(self, unit: FSDPModule) -> None:
        self._unit, self._allowed = unit, False

    def allow(self, *_: Any) -> None:
        """From now on."""
        self._allowed = True

    def __call__(self, *_: Any) -> None:
        if self._allowed:
            self._unit.unshard(async_op=True)


class Neighbours:
    """What a segment gathers for those beside it: ``following`` while its last component runs forward, ``preceding``
    while its first one runs backward."""

    def __init__(self) -> None:
        self.following: GatherAhead | None = None
        self.preceding: GatherAhead | None = None

    def before_last(self) -> None:
        """To be called before a segment's last component runs."""
        if self.following is not None:
            self.following()

    def behind_first(self, output: Tensor) -> None:
        """To be called with what its first component gives."""
        if self.preceding is not None and output.requires_grad:
            output.register_hook(self.preceding)


def acquaint(segments: Sequence[nn.Module], neighbours: Sequence[Neighbours]) -> None:
    """Have every one of ``segments``, in the order in which they run, gather for those beside it; in backward only
    weights that were let go of after forward."""
    units = [[m for m in s.modules() if isinstance(m, FSDPModule) and m is not s] for s in segments]
    for i, j in pairwise(range(len(segments))):
        if units[j]:
            neighbours[i].following = _allowed_by(units[j][0])
        if units[i] and not segments[i].__dict__.get(GATHERED_ONCE):
            neighbours[j].preceding = _allowed_by(units[i][-1])


def _allowed_by(unit: FSDPModule) -> GatherAhead:
    """For a unit once it has run."""
    found = GatherAhead(unit)
    assert isinstance(unit, nn.Module)
    unit.register_forward_hook(found.allow)
    return found
