"""The plan: which component runs how, where, and what that is predicted to cost."""

from __future__ import annotations

from typing import Literal

from asa.errors import InvalidInputError
from asa.ir.codec import noun
from asa.ir.layout import Layout
from asa.ir.profile import Origin, Precision

DataStrategyName = Literal["replicate", "zero1", "zero2", "zero3", "hsdp"]
TensorStrategyName = Literal["none", "tensor"]
ScheduleName = Literal["none", "layers", "gpipe", "1f1b", "interleaved", "zero_bubble"]
OptimizerName = Literal["sgd", "adamw"]


@noun
class DataDegree:
    """Data strategy of a component: into how many shards its batch is cut, and what is kept where."""

    strategy: DataStrategyName
    degree: int


@noun
class TensorDegree:
    """Tensor strategy of a component."""

    strategy: TensorStrategyName
    degree: int


@noun
class Assignment:
    """How one component runs. ``stage`` counts from 0."""

    name: str
    stage: int
    data: DataDegree
    tensor: TensorDegree
    checkpoint: bool = False

    def layout(self, width: int) -> Layout:
        """Its layout in a stage of ``width`` ranks."""
        return Layout(width=width, data=self.data.degree, tensor=self.tensor.degree)


@noun
class Stage:
    """The ranks that run a stage, counting from 0."""

    ranks: tuple[int, ...]


@noun
class Prediction:
    """One training step. ``compute_s`` and ``exposed_communication_s`` and ``bubble_s`` add up to ``step_time_s``.

    ``step_time_low_s`` to ``step_time_high_s`` is the 90 % interval from the measured spread.
    ``memory_bytes_per_rank`` is the active peak, at an upper quantile.
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


@noun
class Certificate:
    """How good the plan is *in the stated space under the stated costs*: no plan there beats ``lower_bound_s``."""

    solver: str
    status: Literal["optimal", "feasible"]
    lower_bound_s: float
    gap: float
    space: str
    solve_s: float


@noun
class Confidence:
    """What uncertain costs leave of a certificate, over ``draws`` joint draws of their errors among ``finalists``
    plans: in which share of them this plan is the fastest, and by how much of the fastest time it is slower on
    average."""

    p_best: float
    expected_regret: float
    finalists: int
    draws: int


@noun
class Baseline:
    """A whole strategy beside the plan. ``why_not`` says why it does not fit, or cannot be built."""

    name: str
    step_time_s: float | None
    memory_bytes_max: int | None
    fits: bool
    why_not: str = ""


@noun
class Plan:
    """Everything an executor needs, and what to hold it to afterwards.

    ``strategy`` is the whole-strategy identifier the plan came from (``asa`` for the search's own answer).
    ``origin`` is ``estimated`` where the profile or the cluster was not measured: the prediction is then one.
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

    def __post_init__(self) -> None:
        if not self.components or not self.stages:
            missing = "stages" if self.components else "components"
            raise InvalidInputError("a plan needs at least one component and one stage", where=f"$.{missing}")
        empty = {*range(len(self.stages))} - {c.stage for c in self.components}
        if empty:
            raise InvalidInputError(f"stage {min(empty)} has no component", where=f"$.stages[{min(empty)}]")
        ranks = [r for s in self.stages for r in s.ranks]
        if sorted(ranks) != list(range(len(ranks))):
            raise InvalidInputError("stages must use ranks 0..n-1, each once", where="$.stages")
        if not 1 <= len(ranks) <= self.gpus:
            raise InvalidInputError(f"stages use {len(ranks)} ranks of {self.gpus}", where="$.stages")
        if self.num_microbatches < 1 or self.global_batch < 1:
            raise InvalidInputError("num_microbatches and global_batch are at least 1", where="$.num_microbatches")
        for i, c in enumerate(self.components):
            where = f"$.components[{i}]"
            if not 0 <= c.stage < len(self.stages):
                raise InvalidInputError(
                    f"component {c.name!r} sits in stage {c.stage} of {len(self.stages)}", where=where
                )
            if i and not 0 <= c.stage - self.components[i - 1].stage <= 1:
                raise InvalidInputError(f"component {c.name!r} breaks the order of stages", where=where)
            width = len(self.stages[c.stage].ranks)
            try:
                c.layout(width)
            except ValueError as error:
                raise InvalidInputError(f"component {c.name!r}: {error}", where=where) from None

    @property
    def num_ranks(self) -> int:
        """Ranks that take part (fewer than ``gpus`` when fewer are faster)."""
        return sum(len(s.ranks) for s in self.stages)

    def starts(self) -> tuple[int, ...]:
        """The first component of every stage."""
        found = {c.stage: i for i, c in reversed(list(enumerate(self.components)))}
        return tuple(found[s] for s in range(len(self.stages)))

    def layouts(self) -> tuple[Layout, ...]:
        """Layout of every component, in order."""
        return tuple(c.layout(len(self.stages[c.stage].ranks)) for c in self.components)
