"""A study: cells over models, data sets, device counts, batches, strategies, epochs and seeds, and their figures."""

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
    """What one cell is: everything that decides its figures, and by which it is found again.

    ``devices``: the device's name where the cell is measured, the cluster's where it is predicted. ``data`` is a name
    as ``--data`` takes it; ``epochs`` how many passes over it.
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


@noun
class StudyRow:
    """A cell and what came of it. ``refused`` and ``open`` cells say ``why``; ``notes``: what a reader should know.

    ``samples_per_epoch`` makes epochs of steps; ``data_source`` says which samples were really read.
    """

    cell: StudyCell
    state: State
    result: BenchResult | None
    why: str = ""
    samples_per_epoch: int | None = None
    data_source: str = ""
    created: str = ""
    asa_version: str = ""
    notes: tuple[str, ...] = ()


@noun
class Published:
    """A figure that somebody else published. ``model`` is empty where they do not say which."""

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
    """A whole study. ``target``: the validation accuracy, 0 to 1, that runs are timed to; ``price`` of a device for an
    hour. ``differs``: why figures cannot be those that were published."""

    name: str
    title: str
    created: str
    rows: tuple[StudyRow, ...]
    published: tuple[Published, ...] = ()
    differs: tuple[str, ...] = ()
    target: float | None = None
    price: float | None = None
