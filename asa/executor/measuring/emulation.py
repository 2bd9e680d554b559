"""An emulated device: everything in a step is real except the kernels, which are replaced by sleeping for the profiled
time.

Processes, process groups, tensors, parameters, gradients, buckets and messages are those of the plan. So many ranks of
a fast device can run on few cores, over any links. A component does not compute, but waits in forward and backward as
long as its profile says. It returns an output of the right shape and type, and gradients of its parameters, all zero.
The optimizer's step sleeps, too. A rank's processor does little besides sending.

All gradients of a component appear when its backward ends, as in the cost model. Real ones appear one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asa.cost.constants import constant
from asa.cost.pricing import times_of
from asa.cost.work.compute import Times, adding
from asa.executor.model.parallel import ParallelModel
from asa.interfaces.strategy import OPTIMIZER_WORDS, Strategies, TensorStrategy
from asa.ir.graph import Component
from asa.ir.layout import bounds
from asa.ir.plan import Assignment, Plan
from asa.ir.profile import Profile
from asa.ir.traffic import Collective, Phase
from asa.sharding.collectives import direct
from asa.sharding.collectives.along_axis import all_gather, all_reduce, reduce_scatter
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.segment import forgo
from asa.sharding.gradients.bucket import Bucket, Send, Wait
from asa.sharding.gradients.sharded import UNREACHED
from asa.tracing import TracedModel
from asa.tracing.component import TracedComponent


def _host_s() -> float:
    """Seconds for which this thread has been running, or ready to run, so far (Linux; 0 elsewhere)."""
    try:
        worked, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return (int(worked) + int(waited)) / 1e9


class DeviceClock:
    """Simulates by sleeping the time for which a device is busy. If it sleeps too long, the excess is subtracted from
    the next sleep.

    ``asynchronous`` says that the device is asynchronous, so that its host launches work in advance. Then the processor
    time of the host since the device was last busy is subtracted as well, but not time spent waiting. (Hosts of many
    ranks on few cores slow each other down.) ``last`` says that the current backward is the last of its step.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self._asynchronous, self._late, self._worked = asynchronous, 0.0, float("inf")
        self.last = True

    def start(self) -> None:
        """Begin a step: no time is carried over."""
        self._late, self._worked = 0.0, float("inf")

    def busy(self, seconds: float) -> None:
        """Sleep until the device has worked for ``seconds``."""
        if self._asynchronous:
            self._late += max(0.0, _host_s() - self._worked)
        remaining = seconds - self._late
        if remaining > 0:
            start = time.perf_counter()
            time.sleep(remaining)
            remaining -= time.perf_counter() - start
        self._late = -remaining
        if self._asynchronous:
            self._worked = _host_s()


class Zeros:
    """Zero tensors of any shape. All are views of one allocation, to which nobody writes."""

    def __init__(self) -> None:
        self._pools: dict[torch.dtype, Tensor] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A read-only zero tensor of ``shape``."""
        count = torch.Size(shape).numel()
        pool = self._pools.get(dtype)
        if pool is None or pool.numel() < count:
            pool = self._pools[dtype] = torch.zeros(count, dtype=dtype)
        return pool[:count].view(*shape)


@dataclass(frozen=True, kw_only=True)
class _Form:
    """Shapes of one sample of each output, the main output first, and the type of the outputs."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


class _Sleeper:
    """Replaces the computation of a component by sleeping."""

    def __init__(
        self, component: Component, traced: TracedComponent, form: _Form, assignment: Assignment, axis: Axis,
        times: Times, clock: DeviceClock, zeros: Zeros, copying_s: Mapping[Phase, float], page: TensorStrategy,
    ) -> None:  # fmt: skip
        self._component, self._traced, self._form = component, traced, form
        self._degree, self._data, self._axis = assignment.tensor.degree, assignment.data.degree, axis
        self._times, self._clock, self._zeros, self._copying_s = times, clock, zeros, copying_s
        self._by_tokens = assignment.tensor.strategy == "sequence"
        self.views: dict[nn.Parameter, Tensor] = {}
        self._page = page
        self._shapes = form.shapes
        sequence = component.split.sequence if assignment.tensor.strategy == "sequence" and component.split else None
        if sequence is not None and sequence.exit and axis.size > 1:
            start, stop = bounds(sequence.tokens, axis.size, axis.index)
            self._shapes = tuple((stop - start, *shape[1:]) for shape in form.shapes)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _Sleep.apply(x, self, *self._traced.parameters())
        return outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Zero outputs, after the time of forward."""
        rows = x.shape[0]
        self._clock.busy(self._copying_s["forward"])
        self._work("forward", rows)
        return tuple(self._zeros.of((rows, *shape), self._form.dtype) for shape in self._shapes)

    def backward(self, x: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor | None, ...]:
        """Zero gradients of the input and the parameters, after the time of backward.

        Gradients that no rank waits for, or that would only be accumulated, are None.
        """
        self._clock.busy(self._copying_s["backward"])
        self._work("backward", x.shape[0])
        last = self._clock.last and self._data > 1
        if last:
            self._clock.busy(self._copying_s["gradient"])
        gradients = (self._gradient(p) if last and p.requires_grad else None for p in parameters)
        return (self._zeros.of(x.shape, x.dtype) if x.requires_grad else None, *gradients)

    def _gradient(self, p: nn.Parameter) -> Tensor:
        """The gradient of the last step if it is a view of a bucket, so that nothing is copied there; otherwise
        zeros."""
        view = self.views.get(p)
        return self._zeros.of(p.shape, p.dtype) if view is None else view.detach()

    def remember(self) -> None:
        """Record where the step's gradients are stored."""
        replicated = [p for p in self._traced.parameters() if not isinstance(p, DTensor)]
        self.views = {p: p.grad for p in replicated if p.grad is not None}

    def _work(self, phase: str, rows: int) -> None:
        work = self._times.work(self._component, rows, self._degree, by_tokens=self._by_tokens)
        seconds = getattr(work, f"{phase}_s") * self._times.whole_ratio(rows)
        inner = [c for c in self._page.traffic(self._component, self._degree, rows) if c.phase == phase]
        for c in inner:
            self._clock.busy(seconds / (len(inner) + 1))
            self._meet(c)
        self._clock.busy(seconds / (len(inner) + 1))

    def _meet(self, c: Collective) -> None:
        ranks = self._axis.size
        part = max(1, round(c.bytes / 4 / ranks))
        if c.op == "all_reduce":
            all_reduce(self._zeros.of((part * ranks,)), self._axis)
        elif c.op == "all_gather":
            all_gather(self._zeros.of((part,)), 0, [part] * ranks, self._axis)
        else:
            reduce_scatter(self._zeros.of((part * ranks,)), 0, [part] * ranks, self._axis)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: _Sleeper, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.sleeper, ctx.parameters = sleeper, parameters
        ctx.save_for_backward(x)  # reading it starts a recomputation, if there is one
        return sleeper.forward(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gradient, *others = ctx.sleeper.backward(x, ctx.parameters)
        return (gradient if ctx.needs_input_grad[0] else None, None, *others)


class _Stream:
    """Reduce-scatters gradients during backward, as the communication stream of a GPU does. A CPU has no real streams,
    so FSDP would wait for each. Results are read before they have arrived, and are not used."""

    def __init__(self) -> None:
        self._works: list[tuple[dist.Work | direct.Pending, Tensor, Tensor]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for one message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        work = direct.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)
        self._works.append((work, output_tensor, input_tensor))

    def drain(self) -> None:
        """Wait for all collectives in flight."""
        for work, _, _ in self._works:
            work.wait()
        self._works.clear()


def _gather_ahead(modules: Sequence[FSDPModule]) -> None:
    """Make FSDP gather each unit's weights while the unit before it computes, as the streams of a GPU allow. Units
    follow their root in ``modules``."""
    before: FSDPModule | None = None
    for module in modules:
        if UNREACHED in module.__dict__:
            module._set_unshard_async_op(True)
            before = None
            continue
        if before is not None:
            before.set_modules_to_forward_prefetch([module])
        before = module


class SleepingUpdate(torch.optim.SGD):
    """An optimizer whose step sleeps for ``seconds`` after gradients have arrived, and changes nothing."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], seconds: float, clock: DeviceClock, stream: _Stream
    ) -> None:  # fmt: skip
        super().__init__([*parameters] or [nn.Parameter(torch.empty(0))], lr=0.0)
        self._seconds, self._clock, self._stream = seconds, clock, stream

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Wait for gradients, then sleep for the time of the update."""
        self._stream.drain()
        self._clock.busy(self._seconds)
        self._clock.start()


@dataclass(frozen=True, kw_only=True)
class EmulatedDevice:
    """An emulated device. Its times are those of ``profile``; times that were not measured follow from
    ``memory_bandwidth`` (bytes/s)."""

    profile: Profile
    memory_bandwidth: float = 0.0


class Emulation:
    """One rank's emulated device under one plan. Pass :meth:`hooks` to
    :func:`asa.executor.model.materialize.materialize`, then call :meth:`optimizer_of` with its result."""

    def __init__(self, device: EmulatedDevice, strategies: Strategies, plan: Plan) -> None:
        forgo()
        profile = device.profile
        self._streams = profile.device.type == "cuda"
        self._strategies, self._plan, self._bandwidth = strategies, plan, device.memory_bandwidth
        self._times = times_of(profile, strategies)
        self._components = {c.name: c for c in profile.graph.components}
        self._forms: dict[str, _Form] = {}
        self._sleepers: list[_Sleeper] = []
        self._update_s = 0.0
        self.clock, self._zeros = DeviceClock(asynchronous=self._streams), Zeros()

    def hooks(self) -> dict[str, Any]:
        """Callbacks for ``materialize``, as keyword arguments."""
        return {"prepare": self.prepare, "stand_in": self.stand_in}

    @torch.no_grad()
    def prepare(self, traced: TracedModel) -> None:
        """Record shapes and types of all outputs, by computing two samples."""
        for c in traced.components:
            if c.name not in self._forms:
                outputs = c(torch.zeros((2, *c.input_shape), dtype=c.input_dtype))
                width = self._components[c.name].output_bytes_per_sample / max(1, outputs[0][0].numel())
                dtype = torch.bfloat16 if width <= 2 else torch.float32
                self._forms[c.name] = _Form(shapes=tuple(tuple(o.shape[1:]) for o in outputs), dtype=dtype)

    def stand_in(self, traced: TracedComponent, assignment: Assignment, axis: Axis) -> None:
        """Replace the computation of ``traced`` by sleeping."""
        component = self._components[traced.name]
        splitting = self._strategies.tensor[assignment.tensor.strategy]
        share = splitting.share(component, assignment.tensor.degree)
        page = self._strategies.data[assignment.data.strategy].of(assignment.data)
        memory = page.memory(share, assignment.data.degree, self._plan.optimizer)
        full = OPTIMIZER_WORDS[self._plan.optimizer] * share.parameter_bytes
        full_update_s = self._times.update(
            component, assignment.tensor.degree, self._plan.optimizer, share.parameter_bytes, self._bandwidth
        )  # fmt: skip
        if full > 0:
            self._update_s += memory.optimizer / full * full_update_s
        copied = self._copied(page.traffic(share, assignment.data.degree, 1))
        copied["gradient"] += constant("ddp_bucket_passes") * memory.buckets
        copied = {phase: size / self._bandwidth if self._bandwidth > 0 else 0.0 for phase, size in copied.items()}
        copied["backward"] += adding(full_update_s, self._plan.optimizer, self._plan.num_microbatches)
        self._update_s += copied["update"]
        sleeper = _Sleeper(
            component, traced, self._forms[traced.name], assignment, axis, self._times, self.clock, self._zeros,
            copied, splitting,
        )  # fmt: skip
        traced.__dict__["train_graph"] = traced.__dict__["eval_graph"] = sleeper
        self._sleepers.append(sleeper)

    def _copied(self, traffic: Sequence[Collective]) -> dict[Phase, float]:
        """Bytes that sharding on a GPU copies besides its all-gathers and reduce-scatters, by phase."""
        copied: dict[Phase, float] = dict.fromkeys(("forward", "backward", "gradient", "update"), 0.0)
        for c in traffic if self._streams else ():
            if c.op in ("all_gather", "reduce_scatter"):
                copied[c.phase] += constant("fsdp_copy_passes") * c.bytes
        return copied

    def optimizer_of(self, model: ParallelModel) -> SleepingUpdate:
        """Replace the computation of the wrappers of ``model``, too. Returns the optimizer to train it with."""
        if self._plan.compression == "none":
            for replica in model.reduction.replicas:
                replica.send = _summed(replica.axis)
        stream = _Stream()
        if self._streams:
            for module in model.sharded:
                module.set_custom_reduce_scatter(stream)  # type: ignore[arg-type]
            _gather_ahead(model.sharded)
            model.gather_across()
        usual = model.reduction.backward

        @contextmanager
        def backward(*, last: bool, in_flight: int) -> Iterator[None]:
            self.clock.last = last
            with usual(last=last, in_flight=in_flight):
                yield

        model.reduction.backward = backward  # type: ignore[method-assign]
        update = SleepingUpdate(model.updated, self._update_s, self.clock, stream)
        update.register_step_post_hook(lambda *_: self._remember())
        return update

    def _remember(self) -> None:
        for sleeper in self._sleepers:
            sleeper.remember()


def _summed(axis: Axis) -> Send:
    """A function that sends buckets by an all-reduce over ``axis`` without the division, which would be work of the
    host."""

    def send(bucket: Bucket) -> Wait:
        work = dist.all_reduce(bucket.flat, group=axis.group, async_op=True)
        assert work is not None
        return work.wait

    return send
