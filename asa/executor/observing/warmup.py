"""Warm-up: steps that are not measured, until a step reuses memory that earlier ones have freed.

A rank's first steps touch memory that is new to the process. The kernel must clear each page; a virtual machine may
first have to get it from the host. The first three steps of VGG-11 under fsdp take 8.1, 7.1 and 3.2 s, with 470, 250
and 117 thousand new pages. The sixth takes 2.2 s with nearly none, like all later ones.

If plans share a process, one plan uses the memory that another has freed. AlexNet's first turns after three other plans
had warmed up took twice as long as all later ones, with 72 to 144 MiB of new pages.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from asa.executor.model.votes import Votes

_MOST = 10
_FEW_LONG, _LONG_S = 2, 2.0
"""Number of steps that suffices if they take longer than these seconds and touch no new memory."""
NEGLIGIBLE_BYTES = 32 * 2**20
"""New memory in one step that can be neglected; it takes 10 to 50 ms."""


def touched() -> int:
    """Bytes of memory that this process has touched for the first time so far (minor page faults)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def warm_up(
    step: Callable[[], float],
    votes: Votes,
    *,
    least: int = 3,
    hurried: bool = False,
    memory: Callable[[], int] = touched,
) -> float:
    """Call ``step``, which returns the slowest rank's seconds, until all ranks are warm. Returns the seconds of the
    last step.

    There are at least ``least`` calls, or two if those took long and the caller is ``hurried``; at most ten.
    """
    spent = 0.0
    for number in range(1, _MOST + 1):
        before = memory()
        seconds = step()
        spent += seconds
        new = max(row[0] for row in votes.gather([float(memory() - before)]))
        enough = number >= least or (hurried and number >= _FEW_LONG and spent > _LONG_S)
        if enough and new < NEGLIGIBLE_BYTES:
            break
    return seconds
