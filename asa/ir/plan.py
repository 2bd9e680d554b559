"""The plan: how and where each component runs, and the prediction of its cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

from asa.errors import InvalidInputError, UsageError
from asa.ir import units
from asa.ir.codec import hashed, later, noun
from asa.ir.codec import save as write
from asa.ir.consistency import Discipline
from asa.ir.execution import Compiled, MemoryFormat
from asa.ir.graph import check_form
from asa.ir.layout import Layout, check_weights
from asa.ir.notebook import shown
from asa.ir.profile import Origin, Precision, Stat
from asa.ir.units import MOST_AMOUNT, MOST_SAMPLES, MOST_SCALE, MOST_SECONDS

_ROUNDING = 1e-9
"""Share by which a step may lie outside its interval."""

DataStrategyName = Literal["replicate", "zero1", "zero2", "zero3", "hsdp"]
TensorStrategyName = Literal["none", "tensor", "sequence"]
ScheduleName = Literal["none", "layers", "gpipe", "1f1b", "interleaved", "zero_bubble"]
OptimizerName = Literal["sgd", "adamw"]
CompressionName = Literal["none", "fp16", "bf16", "powersgd"]
"""Compression of gradients in messages between ranks."""

POWERSGD_RANK = 2
"""Number of columns of the factors that ``powersgd`` sends instead of a gradient."""


@hashed
@noun
class DataDegree:
    """Data strategy of a component, and the number of shards into which its batch is cut.

    ``shards`` is for ``hsdp`` only: the number of consecutive ranks of the data group over which one copy of the state
    is sharded. It is stored in the plan, so that the plan can run without a cluster file.
    """

    strategy: DataStrategyName
    degree: int
    shards: int | None = later()

    def __post_init__(self) -> None:
        if (self.shards is not None) != (self.strategy == "hsdp"):
            raise ValueError("shards are given for hsdp, and for hsdp only")
        if self.shards is not None and not (1 < self.shards < self.degree and self.degree % self.shards == 0):
            raise ValueError(f"hsdp over {self.degree} ranks cannot be cut {self.shards} ways and repeated")

    @property
    def text(self) -> str:
        """Short description.

        >>> DataDegree(strategy="zero3", degree=4).text, DataDegree(strategy="hsdp", degree=8, shards=4).text
        ('zero3 x4', 'hsdp x8 (shards of 4)')
        """
        inside = "" if self.shards is None else f" (shards of {self.shards})"
        return f"{self.strategy} x{self.degree}{inside}"


@hashed
@noun
class TensorDegree:
    """Tensor strategy of a component, and its degree."""

    strategy: TensorStrategyName
    degree: int

    def __post_init__(self) -> None:
        if self.strategy == "none" and self.degree > 1:
            raise ValueError(f"strategy none has degree 1, not {self.degree}")


ONE_COPY, UNSPLIT = DataDegree(strategy="replicate", degree=1), TensorDegree(strategy="none", degree=1)
"""Degrees of a component that one device runs."""


@noun
class Assignment:
    """How one component runs. ``stage`` counts from 0.

    With ``checkpoint`` its activations are recomputed in backward. With ``offload`` its optimizer state and update are
    on the host.
    """

    name: str
    stage: int
    data: DataDegree
    tensor: TensorDegree
    checkpoint: bool = False
    offload: bool = later(False)

    def layout(self, width: int, weights: tuple[int, ...] = ()) -> Layout:
        """Layout of the component in a stage of ``width`` ranks with ``weights`` (empty: equal)."""
        sequence = self.tensor.strategy == "sequence" and self.tensor.degree > 1
        return Layout(
            width=width, data=self.data.degree, tensor=self.tensor.degree, weights=weights, sequence=sequence
        )  # fmt: skip


@noun
class Stage:
    """The ranks of a stage, counting from 0.

    ``weights``: one whole number per rank if batches are not cut evenly (:mod:`asa.ir.layout`).
    """

    ranks: tuple[int, ...]
    weights: tuple[int, ...] | None = later()

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(self.weights, len(self.ranks))


@noun
class Prediction:
    """Prediction of one training step. ``compute_s``, ``exposed_communication_s`` and ``bubble_s`` add up to
    ``step_time_s``.

    ``step_time_low_s`` to ``step_time_high_s`` is the 90 % interval, from the measured spread.
    ``memory_bytes_per_rank`` is the peak of active memory, at an upper quantile.
    """

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    compute_s: float
    exposed_communication_s: float
    hidden_communication_s: float
    update_s: float
    bubble_s: float
    memory_bytes_per_rank: tuple[int, ...]
    samples_per_s: float

    def __post_init__(self) -> None:
        least, most = self.step_time_low_s * (1 - _ROUNDING), self.step_time_high_s * (1 + _ROUNDING)
        if not 0 <= least <= self.step_time_s <= most:
            interval = f"{self.step_time_low_s} to {self.step_time_high_s}"
            message = f"a step of {self.step_time_s} s is not in its interval, {interval}"
            raise InvalidInputError(message, where="$.prediction.step_time_s")
        for name in ("step_time_s", "step_time_low_s", "step_time_high_s", "compute_s", "exposed_communication_s",
                     "hidden_communication_s", "update_s", "bubble_s"):  # fmt: skip
            if abs(getattr(self, name)) > MOST_SECONDS:
                raise InvalidInputError(f"more than {MOST_SECONDS:g} s", where=f"$.prediction.{name}")
        if not all(0 <= size <= MOST_AMOUNT for size in self.memory_bytes_per_rank):
            raise InvalidInputError(f"bytes are 0 to {MOST_AMOUNT:g}", where="$.prediction.memory_bytes_per_rank")


@noun
class CurvePoint:
    """State of a search after ``seconds`` seconds: step time of its best plan (None if it has none yet), and the proved
    lower bound."""

    seconds: float
    best_s: float | None
    lower_bound_s: float


@noun
class Certificate:
    """Proved quality of the plan: no plan *in the stated space, under the stated costs*, is faster than
    ``lower_bound_s``.

    ``gap`` is 1 - lower bound / step time, 0 to 1. ``curve`` is the progress of the search.
    """

    solver: str
    status: Literal["optimal", "feasible"]
    lower_bound_s: float
    gap: float
    space: str
    solve_s: float
    curve: tuple[CurvePoint, ...] | None = later()

    def __post_init__(self) -> None:
        if not (0 <= self.lower_bound_s <= MOST_SECONDS and 0 <= self.gap <= 1 and self.solve_s >= 0):
            message = (
                f"a certificate has a bound of 0 to {MOST_SECONDS:g} s, not {self.lower_bound_s}, a gap of 0 to 1, not "
                f"{self.gap}, and solve_s of at least 0, not {self.solve_s}"
            )
            raise InvalidInputError(message, where="$.certificate")


@noun
class Confidence:
    """Confidence in a plan under uncertain costs, from ``draws`` joint draws of the errors of the costs for
    ``finalists`` plans.

    ``p_best`` is the fraction of draws in which this plan is the fastest, or within 1 % of it. ``expected_regret`` is
    its mean relative slowdown compared with the fastest.
    """

    p_best: float
    expected_regret: float
    finalists: int
    draws: int

    def __post_init__(self) -> None:
        if not (0 <= self.p_best <= 1 and self.expected_regret >= 0):
            message = f"a probability of {self.p_best} is not 0 to 1, or a regret of {self.expected_regret} is below 0"
            raise InvalidInputError(message, where="$.confidence")


@noun
class Trial:
    """One finalist of a measured choice. ``runs`` describes its assignment in words.

    ``step_time_s`` is None if it was not measured because others were more promising. ``p_best_before`` and
    ``p_best_after`` are the probabilities that it is the fastest, or within 1 % of it, from the costs alone and with
    the measurements.
    """

    strategy: str
    runs: str
    predicted_s: float
    step_time_s: Stat | None
    p_best_before: float
    p_best_after: float


@noun
class Measured:
    """Measurement of a plan before it was chosen, in turns with the other finalists on real devices.

    ``step_time_s`` is that of the slowest rank. ``steps`` counts steps including warm-up. ``seconds`` is the time of
    all measurements together. ``before`` and ``after`` are the confidence in the plan that would have been chosen
    before and after measuring.
    """

    step_time_s: Stat
    steps: int
    seconds: float
    created: str
    device_type: Literal["cpu", "cuda"]
    device_name: str
    num_devices: int
    cpu_cores: int
    torch_version: str
    asa_version: str
    before: Confidence
    after: Confidence
    trials: tuple[Trial, ...]


KEPT_OUT = "not allowed by the pins"
"""Reason why a whole strategy that fits cannot be chosen."""
TOO_SLOW = "its compute alone takes longer than another split"
"""Reason why a uniform split was not priced."""


@noun
class Baseline:
    """A standard strategy for the whole model, compared with the plan, in the number of microbatches in which it is
    fastest. ``why_not`` says why it does not fit, or cannot be built."""

    name: str
    step_time_s: float | None
    memory_bytes_max: int | None
    fits: bool
    why_not: str = ""
    num_microbatches: int = later(1)


@noun
class Plan:
    """Everything an executor needs to run a training, and the prediction for it.

    Attributes:
        strategy: name of the whole strategy that the plan came from; ``asa`` for a result of the search.
        origin: ``estimated`` if the profile or the cluster was not measured.
        compression: compression of gradients in messages; anything but ``none`` changes training slightly.
        measured: present if finalists were run against each other and this plan was chosen.
        memory_bytes: memory per device used for planning, if it is not the device's own.
        memory_scale: factor on the profile's saved and transient bytes, after a run that showed them to be too small.
        devices: number in the cluster of the device of every rank, then of the unused devices; given if unequal devices
            are not listed fastest first.
        consistency: the discipline by which data-parallel workers wait for one another; None if they take every step
            together.
    """

    model_spec: str
    model_fingerprint: str
    profile_fingerprint: str
    cluster: str
    cluster_fingerprint: str
    input_shape: tuple[int, ...]
    num_classes: int
    strategy: str
    gpus: int
    global_batch: int
    precision: Precision
    optimizer: OptimizerName
    device_type: Literal["cpu", "cuda"]
    components: tuple[Assignment, ...]
    stages: tuple[Stage, ...]
    schedule: ScheduleName
    num_microbatches: int
    prediction: Prediction
    certificate: Certificate
    baselines: tuple[Baseline, ...]
    origin: Origin
    notes: tuple[str, ...] = ()
    confidence: Confidence | None = None
    compression: CompressionName = later("none")
    measured: Measured | None = later()
    memory_bytes: int | None = later()
    memory_scale: float = later(1.0)
    devices: tuple[int, ...] | None = later()
    consistency: Discipline | None = later()
    memory_format: MemoryFormat = later("contiguous")
    compiled: Compiled = later("none")

    def __post_init__(self) -> None:
        if not self.components or not self.stages:
            missing = "stages" if self.components else "components"
            raise InvalidInputError("a plan needs at least one component and one stage", where=f"$.{missing}")
        empty = {*range(len(self.stages))} - {c.stage for c in self.components}
        if empty:
            raise InvalidInputError(f"stage {min(empty)} has no component", where=f"$.stages[{min(empty)}]")
        if len(self.stages) > 1 and self.schedule == "none":
            raise InvalidInputError(f"{len(self.stages)} stages need a schedule", where="$.schedule")
        ranks = [r for s in self.stages for r in s.ranks]
        if sorted(ranks) != list(range(len(ranks))):
            raise InvalidInputError("stages must use ranks 0..n-1, each once", where="$.stages")
        if not 1 <= len(ranks) <= self.gpus:
            raise InvalidInputError(f"stages use {len(ranks)} ranks of {self.gpus}", where="$.stages")
        if len(ranks) * self.groups > self.gpus or self.global_batch % self.groups:
            message = (
                f"{self.groups} groups of {len(ranks)} ranks, for {self.gpus} devices and {self.global_batch} samples"
            )
            raise InvalidInputError(message, where="$.consistency.groups")
        if self.num_microbatches < 1 or self.global_batch < 1:
            raise InvalidInputError("num_microbatches and global_batch are at least 1", where="$.num_microbatches")
        if self.global_batch > MOST_SAMPLES:
            message = f"a global batch of {self.global_batch} samples is above {MOST_SAMPLES}"
            raise InvalidInputError(message, where="$.global_batch")
        if not 0 < self.memory_scale <= MOST_SCALE or (self.memory_bytes is not None and self.memory_bytes < 1):
            message = f"memory_scale is above 0 and at most {MOST_SCALE:g}, memory_bytes at least 1"
            raise InvalidInputError(message, where="$.memory_scale")
        if self.num_microbatches > self.global_batch:
            raise InvalidInputError(
                f"{self.num_microbatches} microbatches of {self.global_batch} samples", where="$.num_microbatches"
            )
        check_form(self.input_shape, self.num_classes, where="$")
        names: set[str] = set()
        for i, c in enumerate(self.components):
            where = f"$.components[{i}]"
            if c.name in names:
                raise InvalidInputError(f"component {c.name!r} appears twice", where=f"{where}.name")
            names.add(c.name)
            if not 0 <= c.stage < len(self.stages):
                raise InvalidInputError(
                    f"component {c.name!r} is in stage {c.stage} of {len(self.stages)}", where=where
                )
            if i and not 0 <= c.stage - self.components[i - 1].stage <= 1:
                raise InvalidInputError(f"component {c.name!r} breaks the order of stages", where=where)
            stage = self.stages[c.stage]
            try:
                c.layout(len(stage.ranks), stage.weights or ())
            except ValueError as error:
                raise InvalidInputError(f"component {c.name!r}: {error}", where=where) from None

    def check_loaded(self) -> None:
        """Check that a plan read from a file predicts memory for as many ranks as it has. Plans made here always do.

        Raises:
            InvalidInputError: it does not.
        """
        promised = len(self.prediction.memory_bytes_per_rank)
        if promised != self.num_ranks * self.groups:
            message = f"memory of {promised} ranks is predicted, stages use {self.num_ranks * self.groups}"
            raise InvalidInputError(message, where="$.prediction.memory_bytes_per_rank")

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """HTML for notebooks: the summary, and a table of all components."""
        rows = [
            (c.name, c.stage, f"{c.data.strategy} x {c.data.degree}", f"{c.tensor.strategy} x {c.tensor.degree}")
            for c in self.components
        ]
        return shown(self.summary(), ("component", "stage", "data", "tensor"), rows)

    def summary(self) -> str:
        """One line: strategy, model, number of ranks, predicted step time, and comparison with plain data
        parallelism."""
        stages = f", {len(self.stages)} stages" if len(self.stages) > 1 else ""
        batches = f", {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        text = (
            f"plan {self.strategy} for {self.model_spec} on {ranks}{stages}{batches}, global batch {self.global_batch}"
        )
        promised = self.prediction.step_time_s
        if not promised:
            return f"{text}; nothing was measured"
        text += f"; {units.seconds(promised)} a step predicted"
        plain = next((b.step_time_s for b in self.baselines if b.name == "ddp" and b.step_time_s), None)
        if plain and self.strategy != "ddp":
            text += f", {plain / promised:.2f} times as fast as ddp"
        return text

    @property
    def outline(self) -> str:
        """How the plan divides the work, in a few words: ``1f1b of 11 + 3 components, 2 microbatches``."""
        words = list[str]()
        for c in self.components:
            split = f"{c.tensor.strategy} x{c.tensor.degree}" if c.tensor.degree > 1 else ""
            spread = c.data.text if c.data.degree > 1 else ""
            words.append(", ".join(x for x in (spread, split, "checkpointed" if c.checkpoint else "") if x))
        kinds = [f"{word} ({count})" for word, count in Counter(words).most_common() if word]
        stages = Counter(c.stage for c in self.components)
        if len(stages) > 1:
            counts = " + ".join(str(stages[s]) for s in sorted(stages))
            kinds.insert(0, f"{self.schedule} of {counts} components")
        weights = [":".join(map(str, s.weights)) for s in self.stages if s.weights]
        kinds += [f"batch divided {w}" for w in dict.fromkeys(weights)]
        kinds += [f"{self.num_microbatches} microbatches"] if self.num_microbatches > 1 else []
        return ", ".join(kinds) or "one rank"

    def save(self, path: Path | str) -> Path:
        """Write the plan as JSON, for ``plan=`` of another run, ``asa explain`` and ``asa export``; returns the path.

        Raises:
            OSError: it cannot be written.
        """
        write(self, Path(path))
        return Path(path)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part; below ``gpus`` if a plan with fewer ranks is faster."""
        return sum(len(s.ranks) for s in self.stages)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Channels, height and width of an image, or number of tokens of an input.

        Raises:
            InvalidInputError: inputs are neither.
        """
        if len(self.input_shape) not in (1, 3):
            message = f"inputs of {list(self.input_shape)} are neither images (channels, height, width) nor tokens"
            raise InvalidInputError(message, where="$.input_shape")
        return self.input_shape

    @property
    def conduct(self) -> tuple[object, ...]:
        """Everything that determines how the plan runs, without names; plans with equal values run in the same way."""
        return (
            self.components, self.stages, self.num_microbatches, self.schedule, self.compression, self.consistency,
        )  # fmt: skip

    @property
    def num_processes(self) -> int:
        """Number of ranks of all groups, plus servers with processes of their own."""
        served = self.consistency
        servers = served.servers if served is not None and served.placement == "own" else 0
        return self.num_ranks * self.groups + servers

    @property
    def groups(self) -> int:
        """Number of groups that each run the stages and components on an equal share of the batch; usually 1."""
        return (self.consistency.groups if self.consistency is not None else None) or 1

    def of_group(self) -> Plan:
        """The synchronous plan that each of the ``groups`` runs, on its share of the global batch."""
        count = self.groups
        return replace(self, gpus=self.gpus // count, global_batch=self.global_batch // count, consistency=None)

    def fewest(self, rows: int, microbatches: int | None = None) -> int:
        """Smallest number of rows that any shard gets in one of the ``microbatches`` (None: the plan's number) of a
        batch of ``rows`` rows."""
        m = self.num_microbatches if microbatches is None else microbatches
        return min(x.fewest(n) for x in set(self.layouts()) for n in {rows // m, -(-rows // m)})

    def starts(self) -> tuple[int, ...]:
        """Index of the first component of every stage."""
        first = {c.stage: i for i, c in reversed(list(enumerate(self.components)))}
        return tuple(first[s] for s in range(len(self.stages)))

    def layouts(self) -> tuple[Layout, ...]:
        """Layout of every component, in order."""
        stages = [(len(s.ranks), s.weights or ()) for s in self.stages]
        return tuple(c.layout(*stages[c.stage]) for c in self.components)


def wrong_number(plan: Plan, started: int) -> UsageError:
    """The error of a launcher that has ``started`` another number of ranks than ``plan`` is for."""
    return UsageError(
        f"the plan is for {plan.num_processes} ranks, the launcher started {started}; "
        f"use --nproc-per-node {plan.num_processes}, or plan again"
    )
