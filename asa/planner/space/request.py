"""A request to the planner, and pins, which fix the strategy of components."""

from __future__ import annotations

import re
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, get_args

from asa.errors import UsageError
from asa.ir.codec import noun
from asa.ir.plan import CompressionName, DataStrategyName, OptimizerName, TensorStrategyName
from asa.ir.units import MOST_SAMPLES

SolverName = Literal["ilp", "dp", "exhaustive"]
OffloadName = Literal["auto", "always", "never"]

DATA_NAMES: tuple[str, ...] = get_args(DataStrategyName)
TENSOR_NAMES: tuple[str, ...] = get_args(TensorStrategyName)


@noun
class Pin:
    """A rule that components whose name, or a prefix of it up to a dot, matches ``pattern`` use ``strategy``.

    ``degree``: None allows any degree, but only those above 1 for strategies that shard or split something.
    """

    pattern: str
    strategy: str
    degree: int | None = None

    @property
    def axis(self) -> Literal["data", "tensor"]:
        """Which of a component's two choices (data or tensor) is fixed."""
        return "data" if self.strategy in DATA_NAMES else "tensor"

    def matches(self, name: str) -> bool:
        """Whether the pin is for the component ``name``.

        >>> Pin(pattern="classifier", strategy="tensor", degree=2).matches("classifier.0")
        True
        """
        parts = name.split(".")
        return any(fnmatchcase(".".join(parts[:n]), self.pattern) for n in range(1, len(parts) + 1))

    def __str__(self) -> str:
        return f"{self.pattern}={self.strategy}" + ("" if self.degree is None else f"@{self.degree}")

    def allows(self, strategy: str, degree: int) -> bool:
        """Whether the pin allows a choice on its axis. At degree 1 all strategies of one axis are the same.

        >>> Pin(pattern="x", strategy="zero3").allows("zero3", 4), Pin(pattern="x", strategy="zero3").allows("zero3", 1)
        (True, False)
        """
        if self.degree is None:
            return strategy == self.strategy and (degree > 1 or self.strategy in ("none", "replicate"))
        return degree == self.degree and (degree == 1 or strategy == self.strategy)


def parse_pin(text: str) -> Pin:
    """The pin that a text like ``'layer4.*=zero3@4'`` states; without ``@4``, any degree.

    Raises:
        UsageError: the text is not of that form, or names no strategy of a component.
    """
    found = re.fullmatch(r"\s*([^=\s]+)\s*=\s*([a-z0-9_]+)\s*(?:@\s*(\d{1,6})\s*)?", text)
    if found is None:
        raise UsageError(f"pin {text!r} is not of the form COMPONENT=STRATEGY[@DEGREE], as in 'layer4.*=replicate@4'")
    pattern, strategy = found.group(1), found.group(2)
    degree = None if found.group(3) is None else int(found.group(3))
    if strategy not in (*DATA_NAMES, *TENSOR_NAMES):
        offered = (*DATA_NAMES, *TENSOR_NAMES)
        called = {"ddp": "replicate", "fsdp": "zero3"}.get(strategy)
        near = [called] if called else get_close_matches(strategy, offered, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        one_of = f"one of {', '.join(offered)}"
        raise UsageError(f"pin {text!r}: {strategy!r} is no strategy of one component{hint}; {one_of}")
    if degree is not None and (degree < 1 or (strategy == "none" and degree != 1)):
        raise UsageError(f"pin {text!r}: a degree is at least 1, and exactly 1 for none")
    return Pin(pattern=pattern, strategy=strategy, degree=degree)


def usual_limit(gpus: int) -> float:
    """The default time limit of a search in seconds, for a user who waits for the answer.

    >>> usual_limit(8), usual_limit(1024)
    (2.0, 6.0)
    """
    return 2.0 if gpus <= 64 else 6.0


@noun
class Request:
    """One question to the planner.

    ``gpus`` is the most devices that a plan may use. ``memory_bytes`` is per rank; None: that of the device.
    ``strategies``: whole strategies that the answer may be; ``asa``, also where None, is any plan. ``offload``: whether
    optimizer state may be on the host; ``auto``: only where plain data parallelism does not fit. ``microbatches``: how
    many a step has; None: the fastest number. ``uneven``: whether unequal devices may have unequal shares of a batch.
    ``prefer_simple``: answer with the best whole strategy where a mixed plan gains less than the noise, and with plain
    data parallelism where nothing is faster with enough probability.
    """

    gpus: int
    global_batch: int
    memory_bytes: int | None = None
    strategies: tuple[str, ...] | None = None
    pins: tuple[Pin, ...] = ()
    solver: SolverName = "ilp"
    optimizer: OptimizerName = "sgd"
    time_limit_s: float = 10.0
    top_k: int = 1
    prefer_simple: bool = True
    offload: OffloadName = "auto"
    compression: CompressionName = "none"
    uneven: bool = True
    microbatches: int | None = None

    @property
    def named(self) -> frozenset[str]:
        """Strategies that the request names, for the whole model or in pins."""
        return frozenset((*(self.strategies or ()), *(p.strategy for p in self.pins)))

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UsageError(f"a plan needs at least 1 device, asked {self.gpus}")
        if self.global_batch < 1:
            raise UsageError(f"a global batch has at least 1 sample, asked {self.global_batch}")
        if self.global_batch > MOST_SAMPLES:
            raise UsageError(f"a global batch of {self.global_batch} samples is above {MOST_SAMPLES}")
        m = self.microbatches
        if m is not None and (m < 1 or m & (m - 1) or m > self.global_batch):
            raise UsageError(
                f"a batch of {self.global_batch} is not cut into {m} microbatches; take a power of two up to it"
            )
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise UsageError(f"memory of {self.memory_bytes} bytes per device is below 1")
        if self.top_k < 1:
            raise UsageError(f"the number of plans shown is at least 1, asked {self.top_k}")
        if not self.time_limit_s > 0:
            raise UsageError(f"a time limit lies above 0 s, asked {self.time_limit_s}")
        if self.solver not in get_args(SolverName):
            raise UsageError(f"no solver {self.solver!r}; one of {', '.join(get_args(SolverName))}")
        for what, value, known in (
            ("offload", self.offload, get_args(OffloadName)),
            ("compression", self.compression, get_args(CompressionName)),
        ):
            if value not in known:
                raise UsageError(f"no {what} {value!r}; one of {', '.join(known)}")
