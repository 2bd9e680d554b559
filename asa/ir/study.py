"""A study: a grid of cells over models, data sets, device counts, batches, strategies, epochs and seeds, with their
results."""

from __future__ import annotations

from typing import Literal

from asa.ir.bench import BenchResult
from asa.ir.codec import noun
from asa.ir.plan import OptimizerName
from asa.ir.profile import Precision

Mode = Literal["measured", "predicted"]
State = Literal["measured", "predicted", "refused", "open"]


@noun
class StudyCell:
    """Identity of one cell: everything that determines its results.

    ``devices`` is the name of the device if the cell is measured, and of the cluster if it is predicted. ``data`` is a
    name accepted by ``--data``; ``epochs`` is the number of passes over it.
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
        """Whether a measured run ended before all its epochs, because its time was over."""
        if self.state != "measured" or self.result is None or not self.result.accuracy:
            return False
        return self.result.accuracy[-1].epoch < self.cell.epochs - _ROUNDING


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
