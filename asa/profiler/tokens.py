"""Chains of shards with split tokens: the computation of a component between neighbours that also split their
tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asa.ir.graph import LayerGraph
from asa.sharding.collectives.along_axis import cut, gather, shard_sizes
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.tensor import detached_copy, split
from asa.tracing.component import TracedComponent


class _Unsplit(nn.Module):
    """A component that runs whole between others whose tokens are split. ``arriving`` tokens come in shards and are
    gathered before it; ``leaving`` tokens are cut after it. Either is 0 where tokens are whole."""

    def __init__(self, component: nn.Module, axis: Axis, *, arriving: int, leaving: int) -> None:
        super().__init__()
        self.component, self.axis, self.arriving, self.leaving = component, axis, arriving, leaving

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Outputs (main, side outputs)."""
        if self.arriving:
            x = gather(x, 1, shard_sizes(self.arriving, self.axis), self.axis)
        main, *sides = self.component(x)
        if self.leaving:
            main = cut(main, 1, shard_sizes(self.leaving, self.axis), self.axis)
        return (main, *sides)


def cut_by_tokens(graph: LayerGraph, degree: int) -> frozenset[str]:
    """Names of the components that can take their tokens split ``degree`` ways."""
    splits = {c.name: c.split for c in graph.components}
    return frozenset(
        name
        for name, s in splits.items()
        if s is not None and s.sequence is not None and degree <= min(s.max_degree, s.sequence.tokens)
    )


def token_chain(
    components: Sequence[TracedComponent], graph: LayerGraph, axis: Axis, device: torch.device
) -> list[nn.Module]:
    """``components``, with the last rank's shard of each that can split its tokens. The others run whole."""
    names = cut_by_tokens(graph, axis.size)
    splits = [c.split.sequence if c.split is not None and c.name in names else None for c in graph.components]
    reads = [*(0 if s is None else s.tokens for s in splits), 0]
    gives = [0, *(0 if s is None else s.exit_tokens for s in splits)]
    parts: list[nn.Module] = []
    for i, component in enumerate(components):
        if splits[i] is None:
            parts.append(_Unsplit(component, axis, arriving=gives[i], leaving=reads[i + 1]))
            continue
        part: nn.Module = split(detached_copy(component, device), axis, tokens=True)
        # Cut unless the component before splits the tokens.
        needs_cut = i == 0 or (splits[i - 1] is not None and not gives[i])
        parts.append(_Cutting(part, reads[i], axis) if needs_cut else part)
    return parts


class _Cutting(nn.Module):
    """A component that receives its input whole and splits the tokens itself."""

    def __init__(self, component: nn.Module, tokens: int, axis: Axis) -> None:
        super().__init__()
        self.component, self.tokens, self.axis = component, tokens, axis

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Outputs (main, side outputs)."""
        outputs: tuple[Tensor, ...] = self.component(cut(x, 1, shard_sizes(self.tokens, self.axis), self.axis))
        return outputs
