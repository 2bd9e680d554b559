"""One way to run a component, and what of its price several ways have in common."""

from __future__ import annotations

from dataclasses import dataclass

from asa.cost.work.compute import Work
from asa.interfaces.strategy import DataStrategy
from asa.ir.codec import hashed, noun
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree
from asa.ir.traffic import Collective, Memory, Share


@hashed
@noun
class Way:
    """One way to run one component. ``checkpoint``: activations are forgotten, and made again in backward;
    ``offload``: optimizer state and update are on the host."""

    layout: Layout
    data: DataDegree
    tensor: TensorDegree
    checkpoint: bool = False
    offload: bool = False


@dataclass
class Alone:
    """A component in a layout, whoever keeps its state: its share, work, by what the rank is slower than the profile's
    device, collectives inside, seconds that block in forward and backward, and of an update of all its share."""

    share: Share
    work: Work
    slow: float
    inner: tuple[Collective, ...]
    ahead: float
    back: float
    update: float


@dataclass
class Spread:
    """A way under a data strategy: its page, what is held, and seconds as in
    :class:`asa.cost.step.ComponentCost`."""

    page: DataStrategy
    held: Memory
    ahead: float
    back: float
    update_moved: float
    prompt: float
    late: float
    copying: float
