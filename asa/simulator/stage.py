"""One stage of a plan on its streams: forward and backward of microbatches, and work once per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from asa.cost.planned import StagePrice
from asa.interfaces.schedule import Action
from asa.ir.cluster import Overlap
from asa.ir.streams import Stream
from asa.simulator.streams import Streams


class StageRun:
    """Stage number ``number``, on one of its ranks. ``names`` are those of all components of the plan."""

    def __init__(self, number: int, price: StagePrice, names: Sequence[str], overlap: Overlap) -> None:
        self.streams = Streams(overlap, number)
        self._price = price
        self._names = names[price.start : price.start + len(price.components)]

    def forward(self, microbatch: int) -> None:
        """Run all components forward, in order."""
        streams, price = self.streams, self._price
        for boundary, c, name in zip(price.boundaries, price.components, self._names, strict=False):
            streams.block(f"to {name}", "boundary", boundary.forward_s, microbatch)
            streams.block(name, "inside", c.forward_communication_s, microbatch)
            streams.compute(name, "forward", c.forward_s, microbatch)
        streams.block("output", "boundary", price.boundaries[-1].forward_s, microbatch)

    def backward(self, microbatch: int, *, last: bool) -> None:
        """Run all components backward. With the ``last`` microbatch, gradients are reduced."""
        streams, price = self.streams, self._price
        streams.block("output", "boundary", price.boundaries[-1].backward_s, microbatch)
        pending: dict[int, float] = defaultdict(float)
        for i in range(len(self._names) - 1, -1, -1):
            c, name = price.components[i], self._names[i]
            streams.block(name, "inside", c.backward_communication_s, microbatch)
            seconds = c.backward_s + (c.bucket_s if last else 0.0)
            streams.compute(name, "backward", seconds, microbatch, c.covered_s)
            if last:
                pending[c.release] += c.late_sync_s
                streams.release(name, pending.pop(i, 0.0) + c.prompt_sync_s, microbatch)
            streams.block(f"to {name}", "boundary", price.boundaries[i].backward_s, microbatch)

    def finish(self, microbatch: int) -> None:
        """Wait for gradients, then run the optimizer."""
        self.streams.drain()
        for b, name in zip(self._price.boundaries, [*self._names, "output"], strict=True):
            self.streams.block(f"{name} wrapper", "gradient", b.wrapper_s, microbatch)
        for c, name in zip(self._price.components, self._names, strict=True):
            self.streams.compute(name, "update", c.update_s, microbatch)
            self.streams.block(name, "update", c.update_communication_s, microbatch)

    def record_transfer(self, action: Action, start_s: float, end_s: float, to: int) -> None:
        """Record the transfer of a microbatch to a neighbouring stage."""
        stream: Stream = "sending on" if action.direction == "forward" else "sending back"
        self.streams.record(f"to stage {to}", "transfer", stream, start_s, action.microbatch, end_s)
