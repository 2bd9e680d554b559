"""Parameter bytes of a component's neighbours, whose buffers are in memory during its passes."""

from __future__ import annotations

from collections.abc import Callable

from asa.ir.plan import TensorDegree
from asa.ir.traffic import Adjacent


class Around:
    """Parameter bytes of the neighbours of each component on one rank. ``held``: the parameter bytes of every component
    by tensor degree; ``copying``: a reduce-scatter receives into a buffer of its own."""

    def __init__(self, held: Callable[[TensorDegree], list[float]], num_microbatches: int, *, copying: bool) -> None:
        self._held, self._num_microbatches, self._copying = held, num_microbatches, copying
        self._sizes: dict[TensorDegree, tuple[list[float], list[float], list[float]]] = {}

    def of(self, index: int, tensor: TensorDegree, saved: float, alike: range | None = None) -> Adjacent:
        """The neighbours of component ``index``, which saves ``saved`` bytes. They are split by the same tensor degree
        if they can be. ``alike``: the range of components around it that run the same way; all components if None."""
        if alike is not None:
            front, behind, rest = _summed(self._held(tensor)[alike.start : alike.stop])
            index -= alike.start
        else:
            if tensor not in self._sizes:
                self._sizes[tensor] = _summed(self._held(tensor))
            front, behind, rest = self._sizes[tensor]
        return Adjacent(
            front=front[index], behind=behind[index], rest=rest[index], saved=saved,
            num_microbatches=self._num_microbatches, copying=self._copying,
        )  # fmt: skip


def _summed(sizes: list[float]) -> tuple[list[float], list[float], list[float]]:
    """For each component: the nearest non-zero size in front of it, that behind it, and the sum of sizes from it to
    the last."""
    front, behind, rest = [0.0], [0.0], [0.0]
    for size in sizes[:-1]:
        front.append(size if size > 0 else front[-1])
    for size in reversed(sizes):
        rest.append(rest[-1] + size)
    for size in reversed(sizes[1:]):
        behind.append(size if size > 0 else behind[-1])
    return front, behind[::-1], rest[:0:-1]
