"""The profile: measured (or estimated) times and memory of a model on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from asa.errors import InvalidInputError, UsageError
from asa.ir import units
from asa.ir.codec import later, noun
from asa.ir.drift import Drift
from asa.ir.execution import Compiled, MemoryFormat, execution
from asa.ir.graph import LayerGraph, check_count
from asa.ir.notebook import shown
from asa.ir.units import MOST_SAMPLES, MOST_SECONDS

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Origin = Literal["measured", "estimated"]


@noun
class Stat:
    """A time and its spread, in seconds: median, 10th and 90th percentile of ``n`` observations."""

    median: float
    p10: float
    p90: float
    n: int

    def __post_init__(self) -> None:
        if not (self.n >= 1 and 0 <= self.p10 <= self.median <= self.p90 <= MOST_SECONDS):
            raise ValueError(
                f"a time needs n >= 1 and 0 <= p10 <= median <= p90 <= {MOST_SECONDS:g}, got n={self.n}, "
                f"{self.p10}, {self.median}, {self.p90}"
            )

    @staticmethod
    def of(samples: Iterable[float]) -> Stat:
        """Median, 10th and 90th percentile of ``samples`` (at least one).

        The percentiles are the observations at the nearest positions to 0.1 (n - 1) and 0.9 (n - 1) in ascending order.
        """
        ordered = sorted(samples)
        last = len(ordered) - 1
        middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
        return Stat(median=middle, p10=ordered[round(0.1 * last)], p90=ordered[round(0.9 * last)], n=len(ordered))


@noun
class Timing:
    """Times of forward and backward of one component at one microbatch and tensor degree, without communication.

    Attributes:
        saved_bytes: bytes that stay allocated from forward to backward.
        transient_bytes: the most that was allocated during its computation beyond saved bytes, parameters, gradients
            and the component's input.
        unmade_bytes: reduction of ``transient_bytes`` if all gradients of the component are counted from the start of
            backward, although backward allocates them one by one.
        spared_s: seconds of ``forward`` that a second forward leaves out at least; 0 in older files.
    """

    component: str
    microbatch: int
    tensor_degree: int
    forward: Stat
    backward: Stat
    saved_bytes: int
    transient_bytes: int
    unmade_bytes: int = later(0)
    spared_s: float = later(0.0)


@noun
class UpdateTiming:
    """Time of the optimizer step on the parameters that one component has at one tensor degree."""

    component: str
    tensor_degree: int
    optimizer: Literal["sgd", "adamw"]
    step: Stat


@noun
class WholeStep:
    """Consistency check of a profile: time of forward and backward of the whole model, and the sum over its
    components."""

    microbatch: int
    whole: Stat
    components_s: float


@noun
class DeviceRecord:
    """The device of a profile. ``memory_bytes`` is the memory that one rank may use.

    ``virtual`` means that the cores belong to a virtual machine, whose speed may change with other load on its host.
    """

    type: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    threads: int
    virtual: bool = later(False)


@noun
class Ceilings:
    """Peak rates of a device at the profile's precision: FLOP/s of a large matrix product, and bytes/s of a copy."""

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not min(self.flops_per_s, self.bytes_per_s) > 0:
            raise ValueError("ceilings are above 0")


@noun
class Provenance:
    """Origin of a profile. ``disturbed`` says in words why the measurements do not show what the device can do (reduced
    clocks, other processes). It is empty if nothing was noticed. ``others_share`` is the share of a CPU core, 0 to 1,
    that other processes had meanwhile; times are those of the profiler's own work."""

    origin: Origin
    created: str
    asa_version: str
    torch_version: str
    note: str = ""
    disturbed: str = later("")
    others_share: float = later(0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.others_share <= 1:
            raise ValueError(f"a share of a core is from 0 to 1, not {self.others_share}")

    @property
    def trusted(self) -> bool:
        """Whether the profile was measured without disturbance."""
        return self.origin == "measured" and not self.disturbed


@noun
class Profile:
    """Times and memory of every component on one device, at one precision.

    Attributes:
        model_spec: how users name the model (``resnet50``, ``package.module:factory``).
        skipped: descriptions of what could not be measured, for instance a microbatch of one, on which BatchNorm cannot
            train.
        by_tokens: like ``timings``, for shards with split tokens, at some microbatches only. None in older files, and
            for models without such shards.
        drift: changes of the machine's speed during the measurement. Times are at its mean speed.
        memory_format, compiled: how components were computed (:mod:`asa.ir.execution`).
        compile_s: seconds of compilation, once per run.
        ceilings: peak rates of the device, measured in the same run.
    """

    model_spec: str
    model_fingerprint: str
    graph: LayerGraph
    device: DeviceRecord
    precision: Precision
    global_batch: int
    timings: tuple[Timing, ...]
    updates: tuple[UpdateTiming, ...]
    dispatch_floor_s: float
    whole: tuple[WholeStep, ...]
    skipped: tuple[str, ...]
    provenance: Provenance
    by_tokens: tuple[Timing, ...] | None = later()
    drift: Drift | None = later()
    memory_format: MemoryFormat = later("contiguous")
    compiled: Compiled = later("none")
    compile_s: float | None = later()
    ceilings: Ceilings | None = later()

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """HTML for notebooks: the summary, and a table of all components at the largest microbatch."""
        times = {t.component: t for t in self._whole_timings()}
        rows = [
            (
                c.name,
                1e3 * t.forward.median,
                1e3 * t.backward.median,
                c.parameter_bytes / 2**20,
                t.saved_bytes / 2**20,
            )
            for c in self.graph.components
            if (t := times.get(c.name)) is not None
        ]
        return shown(self.summary(), ("component", "forward, ms", "backward, ms", "weights, MiB", "kept, MiB"), rows)

    def summary(self) -> str:
        """One line: the model, the device, and the total time of its components at the largest microbatch."""
        whole = self._whole_timings()
        shape = "x".join(map(str, self.graph.input_shape))
        return (
            f"profile of {self.model_spec} at {shape} on {self.device.name}, {self.precision}: "
            f"{len(self.graph.components)} components, {units.seconds(self.step_s)} forward and backward "
            f"of {max(t.microbatch for t in whole)} samples"
        )

    @property
    def execution(self) -> str:
        """Description of how the components were computed; empty for torch's defaults."""
        return execution(self.memory_format, self.compiled)

    def runs_on(self, gpus: int | None) -> bool:
        """Whether plans for ``gpus`` devices run as it was measured: what is compiled as one runs on one device."""
        return self.compiled != "whole" or gpus == 1

    def check_runs_on(self, gpus: int) -> None:
        """Refuse to plan for ``gpus`` devices unless it :meth:`runs_on` them.

        Raises:
            UsageError: it does not.
        """
        if not self.runs_on(gpus):
            raise UsageError(
                f"a model that is compiled as one runs on one device, asked for {gpus}: all gradients would be sent "
                "after backward; take --gpus 1, or profile it with --compile components"
            )

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward at the largest common microbatch: of all components, or of the whole model if
        it is compiled as one."""
        timings = self._whole_timings()
        whole = [w.whole.median for w in self.whole if w.microbatch == timings[0].microbatch]
        if self.compiled == "whole" and whole:
            return whole[0]
        return sum(t.forward.median + t.backward.median for t in timings)

    def _whole_timings(self) -> list[Timing]:
        """Timings of unsplit components at the largest common microbatch."""
        whole = [t for t in self.timings if t.tensor_degree == 1]
        of_each: dict[str, set[int]] = {}
        for t in whole:
            of_each.setdefault(t.component, set()).add(t.microbatch)
        largest = max(set.intersection(*of_each.values()) or {max(t.microbatch for t in whole)})
        return [t for t in whole if t.microbatch == largest]

    @staticmethod
    def foresee(data: dict[str, Any]) -> None:
        """Refuse a document with too many components before reading each of them.

        Raises:
            InvalidInputError: gives their number.
        """
        graph = data.get("graph")
        parts = graph.get("components") if isinstance(graph, dict) else None
        if isinstance(graph, dict) and isinstance(parts, list):
            check_count(graph.get("model"), len(parts))

    def __post_init__(self) -> None:
        names = {c.name for c in self.graph.components}
        timed = _check_timings(self.timings, names, "timings")
        _check_timings(self.by_tokens or (), names, "by_tokens")
        for missing in sorted(names - timed):
            raise InvalidInputError(f"component {missing!r} has no timing at tensor degree 1", where="$.timings")
        updated: set[tuple[str, int, str]] = set()
        for i, u in enumerate(self.updates):
            what = (u.component, u.tensor_degree, u.optimizer)
            if what in updated:
                raise InvalidInputError(f"update {what} appears twice", where=f"$.updates[{i}]")
            updated.add(what)
            if u.component not in names:
                raise InvalidInputError(
                    f"an update names {u.component!r}, which is not a component", where=f"$.updates[{i}].component"
                )
            if u.tensor_degree < 1:
                raise InvalidInputError(
                    f"tensor degree {u.tensor_degree} of an update is below 1", where=f"$.updates[{i}].tensor_degree"
                )
        for i, w in enumerate(self.whole):
            if (
                w.microbatch < 1
                or not 0 <= w.components_s <= MOST_SECONDS
                or w.microbatch in {x.microbatch for x in self.whole[:i]}
            ):
                raise InvalidInputError(
                    f"a whole step needs a microbatch >= 1 of its own and components_s of 0 to {MOST_SECONDS:g}",
                    where=f"$.whole[{i}]",
                )
        if not 0 <= self.dispatch_floor_s <= MOST_SECONDS:
            raise InvalidInputError(
                f"{self.dispatch_floor_s} s is not between 0 and {MOST_SECONDS:g}", where="$.dispatch_floor_s"
            )
        if not 1 <= self.global_batch <= MOST_SAMPLES:
            raise InvalidInputError(
                f"a global batch of {self.global_batch} samples is not 1 to {MOST_SAMPLES}", where="$.global_batch"
            )


def _check_timings(timings: tuple[Timing, ...], names: set[str], field: str) -> set[str]:
    """Names of the components that are timed unsplit.

    Raises:
        InvalidInputError: a timing has no component, is impossible, or occurs twice.
    """
    timed: set[str] = set()
    seen: set[tuple[str, int, int]] = set()
    for i, t in enumerate(timings):
        key = (t.component, t.microbatch, t.tensor_degree)
        if t.component not in names:
            raise InvalidInputError(
                f"a timing names {t.component!r}, which is not a component", where=f"$.{field}[{i}].component"
            )
        if key in seen:
            raise InvalidInputError(f"timing {key} appears twice", where=f"$.{field}[{i}]")
        if t.microbatch < 1 or t.tensor_degree < 1 or min(t.saved_bytes, t.transient_bytes) < 0:
            raise InvalidInputError(
                "a timing needs microbatch and tensor_degree >= 1 and bytes >= 0", where=f"$.{field}[{i}]"
            )
        if not 0 <= t.spared_s <= MOST_SECONDS:
            raise InvalidInputError(f"{t.spared_s} s are not 0 to {MOST_SECONDS:g}", where=f"$.{field}[{i}].spared_s")
        if not 0 <= t.unmade_bytes <= t.transient_bytes:
            raise InvalidInputError(
                f"{t.unmade_bytes} bytes are not 0 to transient_bytes, {t.transient_bytes}",
                where=f"$.{field}[{i}].unmade_bytes",
            )
        seen.add(key)
        if t.tensor_degree == 1:
            timed.add(t.component)
    return timed
