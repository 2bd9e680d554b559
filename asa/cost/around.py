"""What lies around a component: the neighbours whose buffers are there while it computes."""

from __future__ import annotations

from asa.interfaces.strategy import Strategies
from asa.ir.graph import LayerGraph
from asa.ir.plan import TensorDegree
from asa.ir.traffic import Beside


class Around:
    """The parameter bytes of a graph's components on one rank. ``copying``: what is scattered arrives in memory of its
    own."""

    def __init__(self, graph: LayerGraph, strategies: Strategies, num_microbatches: int, *, copying: bool) -> None:
        self._graph, self._strategies = graph, strategies
        self._several, self._copying = num_microbatches, copying
        self._sizes: dict[TensorDegree, list[float]] = {}

    def of(self, index: int, tensor: TensorDegree, saved: float) -> Beside:
        """Beside component ``index``, which saves ``saved`` bytes; neighbours split as far as it is, if they can be."""
        if tensor not in self._sizes:
            self._sizes[tensor] = self._held(tensor)
        sizes = self._sizes[tensor]
        return Beside(
            front=next((s for s in reversed(sizes[:index]) if s > 0), 0.0),
            behind=next((s for s in sizes[index + 1 :] if s > 0), 0.0),
            rest=sum(sizes[index:]),
            saved=saved,
            num_microbatches=self._several,
            copying=self._copying,
        )

    def _held(self, tensor: TensorDegree) -> list[float]:
        page = self._strategies.tensor[tensor.strategy]
        return [
            float(c.parameter_bytes) if page.refusal(c, tensor.degree) else page.share(c, tensor.degree).parameter_bytes
            for c in self._graph.components
        ]
