"""Data strategy ``zero1``: every rank holds the weights; the optimizer state of each parameter is on one rank only.

Gradients are averaged in buckets during backward, as in DDP. Each rank then updates the parameters it owns and
broadcasts them. Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asa.interfaces.strategy import OPTIMIZER_WORDS, SENT_BYTES, DataStrategy
from asa.ir.graph import Component
from asa.ir.traffic import Collective, Memory, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class SharedOptimizer(DataStrategy):
    """Replicas (:mod:`asa.strategies.replicate`); optimizer state owned by parameter
    (:mod:`asa.sharding.gradients.updates`)."""

    identifier = "zero1"
    joint = True

    def refusal(self, component: Component, degree: int) -> str:
        """Empty: any component can be replicated."""
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory as replicated, except optimizer state: whole parameters are owned by ranks. Small parameters are
        broadcast in copies, a few of every owner at a time."""
        size = share.parameter_bytes
        part = _most([share], degree)
        return Memory(
            parameters=size,
            gradients=size if degree == 1 else 0.0,
            optimizer=OPTIMIZER_WORDS[optimizer] * part,
            buffers=share.buffer_bytes,
            buckets=0.0 if degree == 1 else size,
            accumulated=None if degree == 1 else size,
            transient=0.0 if degree == 1 else share.largest_parameter_bytes,
            updating=0.0 if degree == 1 else min(size, degree * SENT_BYTES),
        )

    def together(self, shares: Sequence[Share], degree: int, optimizer: str) -> float:
        """Bytes of optimizer state; ownership is balanced over the parameters of all neighbours."""
        return OPTIMIZER_WORDS[optimizer] * _most(shares, degree)

    def least(self, share: Share, degree: int, optimizer: str, others: float = float("inf")) -> float:
        """Lower bound in bytes: an even share, or the largest parameter less what the even shares of all others
        leave."""
        even = share.parameter_bytes / degree
        return OPTIMIZER_WORDS[optimizer] * max(even, share.largest_parameter_bytes - others / degree)

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """One all_reduce of the gradients per step, overlapped with backward, and one broadcast of every parameter by
        its owner after the update."""
        size = share.parameter_bytes
        if degree == 1 or not size:
            return ()
        return (
            Collective(op="all_reduce", phase="gradient", bytes=size, ranks=degree, stride=stride),
            Collective(op="broadcast", phase="update", bytes=size, ranks=degree, stride=stride),
        )

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Have the gradients averaged and the update shared out among ranks."""
        from asa.sharding.gradients.replicated import replicated
        from asa.sharding.gradients.updates import share_update

        return share_update(replicated(module, axis), axis)


def _most(shares: Sequence[Share], degree: int) -> float:
    """Upper bound on the parameter bytes that one rank owns, over all of ``shares``.

    Parameters are assigned largest first, each to the rank that owns least
    (:func:`asa.sharding.gradients.updates.owners`). If the rank that owns most has several, it got its last one
    when every rank had one already. So that one is at most the (degree + 1)-th largest, and no rank owned less
    than this rank at that time (Graham 1969).
    """
    total = sum(s.parameter_bytes for s in shares)
    sizes = sorted((size for share in shares for size in _largest(share, degree + 1)), reverse=True)
    if degree == 1 or not sizes:
        return total
    last = sizes[degree] if len(sizes) > degree else 0.0
    return min(total, max(sizes[0], total / degree + (1 - 1 / degree) * last))


def _largest(share: Share, count: int) -> list[float]:
    """Upper bounds on the ``count`` largest parameters of a component, in bytes: the largest is known, and the rest are
    bounded by their sum."""
    most, rest = share.largest_parameter_bytes, max(0.0, share.parameter_bytes - share.largest_parameter_bytes)
    return [most, *(min(most, rest / i) for i in range(1, min(count, share.num_parameter_tensors)))]
