"""Prefetch of weights across segments: the first weights of the next segment are gathered while the last component
runs.

Inside a segment, stock FSDP2 prefetches by itself, because its units have one root. Segments have separate roots or
none. The price of a plan assumes the prefetch (:mod:`asa.cost.traffic.prefetch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asa.sharding.gradients.sharded import gathered_once


class GatherAhead:
    """A hook that starts to gather the weights of ``unit``; it ignores its arguments. The unit itself waits for them
    when it runs.

    Does nothing before :meth:`allow`, because FSDP initializes a unit in its first run.
    """

    def __init__(self, unit: FSDPModule) -> None:
        self._unit, self._allowed = unit, False

    def allow(self, *_: Any) -> None:
        """Enable the hook."""
        self._allowed = True

    def __call__(self, *_: Any) -> None:
        if self._allowed:
            self._unit.unshard(async_op=True)


class Neighbours:
    """Prefetches that a segment starts for its neighbours: ``following`` while its last component runs forward,
    ``preceding`` while its first component runs backward."""

    def __init__(self) -> None:
        self.following: GatherAhead | None = None
        self.preceding: GatherAhead | None = None

    def before_last(self) -> None:
        """Call this before a segment's last component runs."""
        if self.following is not None:
            self.following()

    def behind_first(self, output: Tensor) -> None:
        """Call this with the output of a segment's first component."""
        if self.preceding is not None and output.requires_grad:
            output.register_hook(self.preceding)


def acquaint(segments: Sequence[nn.Module], neighbours: Sequence[Neighbours]) -> None:
    """Make each of ``segments``, given in their order of execution, prefetch weights for its neighbours. In backward
    these are only weights that were freed after forward."""
    units = [[m for m in s.modules() if isinstance(m, FSDPModule) and m is not s] for s in segments]
    for i, j in pairwise(range(len(segments))):
        if units[j]:
            neighbours[i].following = _allowed_by(units[j][0])
        if units[i] and not gathered_once(units[i][-1]):
            neighbours[j].preceding = _allowed_by(units[i][-1])


def _allowed_by(unit: FSDPModule) -> GatherAhead:
    """A prefetch of ``unit`` that is enabled after its first run."""
    prefetch = GatherAhead(unit)
    assert isinstance(unit, nn.Module)
    unit.register_forward_hook(prefetch.allow)
    return prefetch
