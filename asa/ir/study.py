"""A study: a grid of cells over models, data sets, device counts, batches, strategies, epochs and seeds, with their
results."""

from __future__ import annotations

from typing import Literal

from asa.ir.bench import BenchResult
from asa.ir.codec import later, noun
from asa.ir.consistency import is_discipline
from asa.ir.plan import OptimizerName
from asa.ir.profile import Precision

Mode = Literal["measured", "predicted"]
State = Literal["measured", "predicted", "refused", "open"]


@noun
class StudyCell:
    """Identity of one cell: everything that determines its results.

    ``devices`` is the name of the device if the cell is measured, and of the cluster if it is predicted. ``data`` is a
    name accepted by ``--data``; ``epochs`` is the number of passes over it.

    The last fields are as usual unless the command says otherwise. ``learning_rate``: None for that of the optimizer,
    and in predicted cells. ``microbatches``: None for the fastest number, and of strategies that are no pipelines.
    ``classes``: None for the usual number. ``memory_bytes``: limit for a plan; None for that of the device.
    ``alone``: it trained in a run of its own, although its strategy can take turns with others.
    """

    model: str
    data: str
    input_shape: tuple[int, ...]
    gpus: int
    global_batch: int
    strategy: str
    epochs: int
    seed: int
    precision: Precision
    optimizer: OptimizerName
    mode: Mode
    devices: str
    learning_rate: float | None = None
    microbatches: int | None = later()
    classes: int | None = later()
    memory_bytes: int | None = later()
    alone: bool = later(False)

    @property
    def run(self) -> str:
        """Whether it was measured ``alone`` or ``in turns`` with others; empty if it was not measured."""
        if self.mode == "predicted":
            return ""
        return "alone" if self.alone or always_alone(self.strategy) else "in turns"


def always_alone(strategy: str) -> bool:
    """Whether it cannot take turns with others: its workers do not wait for one another, or it may change its plan."""
    return is_discipline(strategy) or strategy.endswith("+replan")


_ROUNDING = 0.01
"""Fraction of an epoch by which a run may be shorter than requested."""


@noun
class StudyRow:
    """A cell and its result. ``why`` is the reason of a ``refused`` or ``open`` cell; ``notes`` are remarks for the
    reader.

    ``samples_per_epoch`` converts steps to epochs. ``num_classes`` is that of the data, if known.
    ``data_source`` says which samples were read. ``oversubscribed``: more ranks than cores, so times compare nothing.
    """

    cell: StudyCell
    state: State
    result: BenchResult | None
    why: str = ""
    samples_per_epoch: int | None = None
    num_classes: int | None = None
    oversubscribed: bool = False
    data_source: str = ""
    created: str = ""
    asa_version: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ended_early(self) -> bool:
        """Whether a measured run ended before all its epochs."""
        if self.state != "measured" or self.result is None:
            return False
        return not self.result.accuracy or self.result.accuracy[-1].epoch < self.cell.epochs - _ROUNDING


@noun
class Published:
    """A number from another publication. ``model`` is empty if it does not say which."""

    strategy: str
    model: str
    data: str
    hardware: str
    gpus: int
    metric: str
    value: float
    source: str


@noun
class Study:
    """A complete study. ``target`` is the validation accuracy, 0 to 1, to which time is measured. ``price`` is that of
    a device per hour. ``differs`` says why results cannot equal the published ones."""

    name: str
    title: str
    created: str
    rows: tuple[StudyRow, ...]
    published: tuple[Published, ...] = ()
    differs: tuple[str, ...] = ()
    target: float | None = None
    price: float | None = None
