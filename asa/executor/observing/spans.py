"""Time and saved memory of every component in a step, measured by hooks at its input and output.

A component's backward begins when the gradient of its output is known, and ends when that of its input is. Autograd
runs the latest operations first, and accumulates a parameter's gradient as soon as it is known
(:mod:`asa.profiler.chain`). Time between components (boundaries, hooks of wrappers) is assigned to no component.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from asa.executor.training.clock import seconds_between, time_mark
from asa.executor.training.worker import Worker
from asa.instruments.allocations import Event, record
from asa.ir.rehearsal import ComponentSpan

_MARK = "asa.span."
_Key = tuple[str, int]
_Read = Callable[[Sequence[int]], tuple[tuple[ComponentSpan, ...], float]]


class ComponentTimer:
    """Hooks on the components of a worker while one of its contexts is open."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._components = worker.model.components
        self._cuda = worker.model.device.type == "cuda"

    def _now(self) -> Any:
        return time_mark(self._cuda)

    @contextmanager
    def _hooked(self, note: Callable[[str, int], None]) -> Iterator[None]:
        """Context in which ``note(what, component)`` is called at every point of a step.

        ``what`` is ``enter`` and ``leave`` around a component's forward; ``back`` and ``through`` around its backward;
        ``turn`` and ``done``, with component -1, around a microbatch's backward; ``update`` and ``updated`` around the
        optimizer's step.
        """
        handles: list[RemovableHandle] = []
        for i, component in enumerate(self._components):

            def begin_forward(_: Any, args: tuple[Any, ...], i: int = i) -> None:
                note("enter", i)
                if args[0].requires_grad:
                    args[0].register_hook(lambda _: note("through", i))

            def end_forward(_m: Any, _a: Any, _o: Any, i: int = i) -> None:
                note("leave", i)

            def watch_output(_m: Any, _a: Any, out: tuple[Tensor, ...], i: int = i) -> None:
                if out[0].requires_grad:
                    out[0].register_hook(lambda _: note("back", i))

            handles.append(component.register_forward_pre_hook(begin_forward))
            # Hooks before and after those of wrappers, which gather weights for backward.
            handles.append(component.register_forward_hook(end_forward, prepend=True))
            handles.append(component.register_forward_hook(watch_output))
        optimizer = self._worker.optimizer
        handles.append(optimizer.register_step_pre_hook(lambda *_: note("update", -1)))
        handles.append(optimizer.register_step_post_hook(lambda *_: note("updated", -1)))
        reduction = self._worker.model.reduction
        usual = reduction.backward

        @contextmanager
        def backward(*, last: bool, in_flight: int) -> Iterator[None]:
            note("turn", -1)
            with usual(last=last, in_flight=in_flight):
                yield
                note("done", -1)

        reduction.backward = backward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del reduction.backward  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()

    @contextmanager
    def timing(self) -> Iterator[_Read]:
        """Context that times steps. Yields a function that takes the bytes that each component saved, and returns spans
        and the seconds of the update."""
        marks: list[tuple[str, int, Any]] = []
        with self._hooked(lambda what, i: marks.append((what, i, self._now()))):
            yield lambda saved: self._read(marks, saved)

    def _read(
        self, marks: Sequence[tuple[str, int, Any]], saved: Sequence[int]
    ) -> tuple[tuple[ComponentSpan, ...], float]:
        """Median over steps of the times of every component, and of the update, in seconds."""
        if self._cuda:
            torch.cuda.synchronize()
        steps: list[dict[_Key, float]] = []
        sums: dict[_Key, float] = defaultdict(float)
        begun: dict[_Key, Any] = {}
        ends = {"leave": "enter", "through": "back", "updated": "update"}
        for what, i, at in marks:
            if what in ends:
                start = begun.pop((ends[what], i), None)
                if start is not None:
                    sums[ends[what], i] += seconds_between(start, at)
            elif what == "done":  # a component without a gradient of its input ends with the microbatch
                for key in [k for k in begun if k[0] == "back"]:
                    sums[key] += seconds_between(begun.pop(key), at)
            else:
                begun[what, i] = at
            if what == "updated":
                steps.append(sums)
                sums, begun = defaultdict(float), {}

        def usual(key: _Key) -> float:
            return median(s[key] for s in steps)

        spans = tuple(
            ComponentSpan(name=c.name, forward_s=usual(("enter", i)), backward_s=usual(("back", i)), saved_bytes=size)
            for i, (c, size) in enumerate(zip(self._components, saved, strict=True))
        )
        return spans, usual(("update", -1))

    def saved(self, step: Callable[[], object]) -> list[int]:
        """Bytes that each component allocates in its first forward of ``step`` and that are still alive when backward
        begins."""
        names: dict[tuple[str, int], str] = {}

        def mark(what: str, i: int) -> None:
            if (what, i) not in names and ("turn", -1) not in names:
                names[what, i] = f"{_MARK}{len(names)}"
                with record_function(names[what, i]):
                    pass

        with self._hooked(mark):
            events, times = record(step, self._worker.model.device, _MARK)
        at = {key: times[name] for key, name in names.items()}
        return [_living(events, at["enter", i], at["leave", i], at["turn", -1]) for i in range(len(self._components))]


def _living(events: Sequence[Event], start: int, stop: int, until: int) -> int:
    """Bytes allocated between ``start`` and ``stop`` and not released by ``until`` (nanoseconds)."""
    living: dict[int, int] = {}
    for event in events:
        if event.at > until:
            break
        if event.size < 0:
            living.pop(event.pointer, None)
        elif start <= event.at <= stop:
            living[event.pointer] = event.size
    return sum(living.values())
