"""How much Python asa adds to a step: its own step less the hand-written one, on networks too thin to compute much.

What a user would call added is the difference of two steps that do the same. Both are driven by Python, and what asa
has in place of a page of stock PyTorch (a boundary where ``parallelize_module`` goes through ``DTensor``, an order of
microbatches where ``torch.distributed.pipelining`` has its own) adds only what it takes beyond that page.

So both steps are run whole, in turns, and the CPU time of the thread that runs them is compared. No profiler, whose own
cost is several times that of a call, is in between; kernels are the same in both and, at a few channels and samples,
next to nothing; waiting, and what gloo's threads do meanwhile, is not this thread's. How often functions of asa's own
are called is counted as well (:func:`own_calls`): a figure that is the same in every run.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import asa

Step = Callable[[], object]


def thin(network: nn.Module, divisor: int = 16) -> nn.Module:
    """``network`` with one in ``divisor`` of its channels (at least one; three stay three), in place: as many modules,
    parameters and calls, and hardly anything to compute. Linear layers behind convolutions follow their channels."""

    def fewer(count: int) -> int:
        return count if count <= 3 else max(1, count // divisor)

    convolutional = any(isinstance(m, nn.Conv2d) for m in network.modules())
    for m in network.modules():
        if isinstance(m, nn.Conv2d):
            nn.Conv2d.__init__(
                m, fewer(m.in_channels), fewer(m.out_channels), m.kernel_size, m.stride, m.padding,  # type: ignore[arg-type]
                bias=m.bias is not None,
            )  # fmt: skip
        elif isinstance(m, nn.BatchNorm2d):
            nn.BatchNorm2d.__init__(m, fewer(m.num_features))
        elif isinstance(m, nn.Linear) and convolutional:
            nn.Linear.__init__(m, fewer(m.in_features), m.out_features)
    return network


def added_python(asa_step: Step, stock_step: Step, together: Callable[[], object], pairs: int = 60) -> float:
    """Median over ``pairs`` of the CPU seconds of this thread in ``asa_step`` less those in ``stock_step``, taken in
    turns; before each, ranks come ``together``."""
    found = []
    for pair in range(pairs):
        took = {}
        for step in (asa_step, stock_step) if pair % 2 else (stock_step, asa_step):
            together()
            start = time.thread_time()
            step()
            took[step] = time.thread_time() - start
        found.append(took[asa_step] - took[stock_step])
    return statistics.median(found)


def own_calls(step: Step) -> int:
    """Calls of functions in asa's own files during ``step``."""
    home, profile = str(Path(asa.__file__).parent), cProfile.Profile()
    profile.enable()
    step()
    profile.disable()
    stats: Any = pstats.Stats(profile)
    return sum(count for (file, _, _), (_, count, *_) in stats.stats.items() if file.startswith(home))
