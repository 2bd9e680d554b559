"""Neighbourhood of the local search: one cut moved, one rank moved to another stage or left idle, one stage in another
style, two stages joined or one halved, twice or half the microbatches, another schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from asa.planner.pipeline.sketch import PipelineOutline, Sketch, StageStyle
from asa.planner.space.space import MOST_IN_A_PIPELINE, widths

_LONG = 40
"""Stages beyond which widths and the number of stages stay, and a cut moves by one component only."""


class Neighbours:
    """Outlines that differ from a given one in one change, whether they fit or not."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch, self.space, self.n = sketch, sketch.space, sketch.n
        self.widths = tuple(w for w in widths(sketch.gpus) if w < sketch.gpus)
        self._styles: dict[tuple[int, int], list[StageStyle]] = {}

    def of(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        """Neighbours of ``x``, the most promising first."""
        p = len(x.starts)
        yield from self._cut_elsewhere(x, 1)
        for name in self.space.schedules:
            if name != x.schedule:
                yield replace(x, schedule=name)
        for m in (x.num_microbatches // 2, 2 * x.num_microbatches):
            if m <= MOST_IN_A_PIPELINE and m in self.space.microbatches():
                yield replace(x, num_microbatches=m)
        yield from self._otherwise(x)
        if p <= _LONG:
            yield from self._other_widths(x)
            yield from self._joined(x)
            yield from self._halved(x)
            yield from self._cut_elsewhere(x, 2)

    def _cut_elsewhere(self, x: PipelineOutline, far: int) -> Iterator[PipelineOutline]:
        ends = (*x.starts, self.n)
        for s in range(1, len(x.starts)):
            for start in (x.starts[s] - far, x.starts[s] + far):
                if ends[s - 1] < start < ends[s + 1] and self.space.profile.graph.cuttable(start):
                    yield replace(x, starts=(*x.starts[:s], start, *x.starts[s + 1 :]))

    def _offered(self, w: int, m: int) -> list[StageStyle]:
        if (w, m) not in self._styles:
            self._styles[w, m] = self.sketch.styles(w, m, save_memory=True)
        return self._styles[w, m]

    def _otherwise(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        for s, w in enumerate(x.widths):
            for style in self._offered(w, x.num_microbatches):
                if style != x.styles[s]:
                    yield replace(x, styles=(*x.styles[:s], style, *x.styles[s + 1 :]))

    def _resized(self, x: PipelineOutline, s: int, w: int) -> PipelineOutline | None:
        """The outline with width ``w`` for stage ``s``, in the style most like its own; None for an impossible
        width."""
        if w not in self.widths:
            return None
        old = x.styles[s]
        style = min(
            self._offered(w, x.num_microbatches),
            key=lambda y: (y.strategy != old.strategy, y.checkpoint != old.checkpoint,
                           abs(y.tensor - old.tensor) if old.tensor < x.widths[s] or old.tensor == 1 else -y.tensor),
        )  # fmt: skip
        return replace(
            x, widths=(*x.widths[:s], w, *x.widths[s + 1 :]), styles=(*x.styles[:s], style, *x.styles[s + 1 :])
        )

    def _other_widths(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        """Outlines with one rank (or one node) moved from one stage to another, or from or to the idle ranks."""
        for s, w in enumerate(x.widths):
            for up in (v for v in (w + 1, w + 8) if v in self.widths):
                grown = self._resized(x, s, up)
                if grown is None:
                    continue
                yield grown
                for k, v in enumerate(x.widths):
                    if k != s and (shrunk := self._resized(grown, k, v - (up - w))) is not None:
                        yield shrunk
            for down in (v for v in (w - 1, w - 8) if v in self.widths):
                less = self._resized(x, s, down)
                if less is not None:
                    yield less

    def _joined(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        for s in range(1, len(x.starts)):
            fewer = PipelineOutline(
                x.starts[:s] + x.starts[s + 1 :], x.widths[:s] + x.widths[s + 1 :], x.styles[:s] + x.styles[s + 1 :],
                x.num_microbatches, x.schedule,
            )  # fmt: skip
            if len(fewer.starts) < 2:
                return
            yield fewer
            for k in {0, s - 1, len(fewer.starts) - 1}:
                if (resized := self._resized(fewer, k, fewer.widths[k] + x.widths[s])) is not None:
                    yield resized

    def _halved(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        ends = (*x.starts, self.n)
        for s, w in enumerate(x.widths):
            middle = (ends[s] + ends[s + 1]) // 2
            if w < 2 or not ends[s] < middle < ends[s + 1] or not self.space.profile.graph.cuttable(middle):
                continue
            more = PipelineOutline(
                (*x.starts[: s + 1], middle, *x.starts[s + 1 :]), (*x.widths[: s + 1], w, *x.widths[s + 1 :]),
                (*x.styles[: s + 1], x.styles[s], *x.styles[s + 1 :]), x.num_microbatches, x.schedule,
            )  # fmt: skip
            first = self._resized(more, s, w - w // 2)
            resized = None if first is None else self._resized(first, s + 1, w // 2)
            if resized is not None:
                yield resized
