"""The whole strategies: one choice for the whole network, as points of the same space.

Where a component refuses its part (nothing to split, nothing to shard), it is run whole, repeated by the ranks that
would have split it: what the stock implementations do.
"""

from __future__ import annotations

import re

from asa.cost.pricing import Way
from asa.errors import UsageError
from asa.interfaces.strategy import Strategies
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, DataStrategyName, TensorDegree
from asa.planner.candidate import Candidate
from asa.planner.space import Space

_DATA: dict[str, DataStrategyName] = {
    "ddp": "replicate",
    "zero1": "zero1",
    "zero2": "zero2",
    "fsdp": "zero3",
    "hsdp": "hsdp",
}
_LATER = ("layers", "gpipe", "1f1b", "interleaved", "zero_bubble", "ps_sync", "ps_async", "ps_bounded")
_HYBRID = re.compile(r"hybrid:d(\d{1,5})t(\d{1,5})")


class Unavailable(Exception):
    """A whole strategy that cannot be run as asked; the message says why, in few words."""


def names(strategies: Strategies, gpus: int) -> tuple[str, ...]:
    """Every whole strategy that is built, with each proper hybrid of ``gpus`` devices."""
    found = ["single", *(n for n, data in _DATA.items() if data in strategies.data)]
    if "tensor" in strategies.tensor:
        found.append("tensor")
        found += [f"hybrid:d{gpus // t}t{t}" for t in range(gpus - 1, 1, -1) if gpus % t == 0]
        found.append("hybrid")
    return tuple(found)


def check(asked: tuple[str, ...], strategies: Strategies, gpus: int) -> None:
    """Refuse whole strategies that are unknown or not built.

    Raises:
        UsageError: naming those that are.
    """
    known = ("asa", *names(strategies, gpus))
    for name in asked:
        if name in known or _HYBRID.fullmatch(name):
            continue
        if name in _LATER or name in _DATA or re.fullmatch(r"hybrid:d\d+p\d+(t\d+)?", name):
            raise UsageError(f"strategy {name} is not built yet; one of {', '.join(known)}")
        raise UsageError(f"no strategy {name!r}; one of {', '.join(known)}")


def members(name: str, strategies: Strategies, gpus: int) -> tuple[str, ...]:
    """The whole strategies that ``name`` stands for: itself, and for ``hybrid`` every uniform split of the devices."""
    if name != "hybrid":
        return (name,)
    proper = tuple(n for n in names(strategies, gpus) if _HYBRID.fullmatch(n))
    return ("ddp", *proper, "tensor") if gpus > 1 else ("single",)


def uniform(name: str, space: Space, num_microbatches: int) -> Candidate:
    """The candidate of one whole strategy (other than ``asa`` and ``hybrid``).

    Raises:
        Unavailable: fewer samples, devices or cuts than it needs.
    """
    gpus = space.request.gpus
    data, d, t = _degrees(name, gpus)
    width = d * t
    if width > gpus:
        raise Unavailable(f"needs {width} devices, there are {gpus}")
    if name != "single" and width == 1:
        raise Unavailable("needs at least 2 devices")
    if t > 1 and "tensor" not in space.strategies.tensor:
        raise Unavailable("strategy tensor is not offered")
    ways = []
    for i, component in enumerate(space.profile.graph.components):
        if not space.enough_samples(i, d, num_microbatches):
            per_rank = space.request.global_batch / num_microbatches / d
            least = "1 sample" if per_rank < 1 else "2 samples for BatchNorm"
            raise Unavailable(f"{component.name} needs {least} per rank, gets {per_rank:.3g}")
        splits = t > 1 and not space.strategies.tensor["tensor"].refusal(component, t)
        layout = Layout(width=width, data=d, tensor=t if splits else 1)
        has_parameters = component.parameter_bytes > 0
        shards = data in space.strategies.data and not space.strategies.data[data].refusal(component, d)
        ways.append(
            Way(
                layout=layout,
                data=DataDegree(strategy=data if d > 1 and has_parameters and shards else "replicate", degree=d),
                tensor=TensorDegree(strategy="tensor" if splits else "none", degree=layout.tensor),
            )
        )
    if t > 1 and all(w.layout.tensor == 1 for w in ways):
        raise Unavailable(f"no component can be split {t} ways")
    return Candidate(origin=name, width=width, num_microbatches=num_microbatches, ways=tuple(ways))


def _degrees(name: str, gpus: int) -> tuple[DataStrategyName, int, int]:
    if name == "single":
        return "replicate", 1, 1
    if name == "tensor":
        return "replicate", 1, gpus
    hybrid = _HYBRID.fullmatch(name)
    if hybrid is not None:
        d, t = int(hybrid.group(1)), int(hybrid.group(2))
        if min(d, t) < 1:
            raise UsageError(f"{name}: degrees are at least 1")
        return "replicate", d, t
    return _DATA[name], gpus, 1
