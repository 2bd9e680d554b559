"""Memory of one training step, component by component, from the allocator's own record.

Torch's profiler records every allocation and release, also those inside operators and in backward, on CPU and CUDA.
What was allocated in a component's forward and is still alive after the whole forward is what it *saved*. What a step
needs beyond that is *transient*. The planner's bound on a rank's peak, in bytes,

    state + sum_{l <= k} saved_l + sum_{l >= k} gradients_l + transient_k        (the largest over all k)

is therefore never below the record: ``transient_k`` is the part that its other terms do not explain.

Gradients of parameters count as if they existed before the first is computed, because they do if several microbatches
accumulate them, or if buckets hold them. Otherwise the transient part is smaller, by *unmade*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.profiler import record_function

from asa.instruments.allocations import Event, record
from asa.profiler.chain import Chain, Marks
from asa.profiler.clock import quiet

_MARK = "asa.mark."


@dataclass(frozen=True)
class ComponentMemory:
    """Bytes of one component in one step: ``saved`` from forward to backward; ``transient``, the largest amount beyond
    that; and ``unmade``, the reduction of ``transient`` if gradients do not exist before they are computed."""

    saved: int
    transient: int
    unmade: int = 0


@dataclass(frozen=True)
class StepMemory:
    """Memory of every component, and the peak of all allocations of the step, in bytes."""

    components: tuple[ComponentMemory, ...]
    peak: int


def measure_memory(chain: Chain, x: Tensor) -> StepMemory:
    """Run one step of ``x`` and account for its allocations. Gradients are cleared before and after."""
    chain.clear()
    names: list[str] = []

    def mark() -> int:
        names.append(f"{_MARK}{len(names)}")
        with record_function(names[-1]):
            pass
        return len(names) - 1

    # Only allocations of the step itself are recorded, so the step must release nothing older.
    marked: list[Marks] = []
    with quiet():
        events, times = record(lambda: marked.append(chain.step(x, mark)), chain.device, _MARK)
    (marks,) = marked
    chain.clear()
    timed = Marks(forward=[times[names[m]] for m in marks.forward], backward=[times[names[m]] for m in marks.backward])
    gradients = [
        sum(p.numel() * p.element_size() for p in component.parameters() if p.requires_grad)
        for component in chain.components
    ]
    return account(events, timed, gradients)


def account(events: Sequence[Event], marks: Marks, gradients: Sequence[int]) -> StepMemory:
    """Assign ``events`` (sorted by time) to components. ``gradients`` are the bytes of each component's gradients."""
    count = len(gradients)
    forward_end = marks.forward[count]
    gradient_events = _surviving(events, forward_end)
    living: dict[int, tuple[int, int]] = {}
    behind = [sum(gradients[k:]) for k in range(count)]
    saved, highest, highest_made, alive, peak = [0] * count, [0] * count, [0] * count, 0, 0
    past_forward, lasting = False, 0
    for number, event in enumerate([*events, Event(at=1 << 63, pointer=0, size=0)]):
        if not past_forward and event.at >= forward_end:
            past_forward = True
            for at, size in living.values():
                saved[_component(marks.forward, at)] += size
        if event.size > 0:
            living[event.pointer] = (event.at, event.size)
            alive += event.size
            lasting += event.size * (number in gradient_events)
        elif event.pointer in living:
            alive -= living.pop(event.pointer)[1]
        peak = max(peak, alive)
        if event.at < forward_end:
            k = _component(marks.forward, event.at)
        elif event.at <= marks.backward[0]:
            k = _component([-m for m in marks.backward], -event.at)
        else:
            continue
        highest[k] = max(highest[k], alive - min(lasting, behind[k]))
        highest_made[k] = max(highest_made[k], alive - behind[k])
    components = []
    for k in range(count):
        saved_before = sum(saved[: k + 1])
        transient = max(highest[k] - saved_before, 0)
        unmade = transient - max(highest_made[k] - saved_before, 0)
        components.append(ComponentMemory(saved=saved[k], transient=transient, unmade=unmade))
    return StepMemory(components=tuple(components), peak=peak)


def _surviving(events: Sequence[Event], since: int) -> set[int]:
    """Indices of allocations after ``since`` that outlive the step: those of gradients."""
    last = {}
    for number, event in enumerate(events):
        if event.size > 0:
            last[event.pointer] = number
        else:
            last.pop(event.pointer, None)
    return {number for number in last.values() if events[number].at >= since}


def _component(rising: Sequence[int], at: int) -> int:
    """Index of the interval between consecutive marks that contains ``at``; the outermost intervals are open."""
    for i in range(1, len(rising) - 1):
        if at < rising[i]:
            return i - 1
    return len(rising) - 2
