"""Messages that are to hide behind a pass, on links over which the pass itself sends.

Where a component is split by tensors and by data over the same links, its gradients, or the weights gathered for it,
are under way while it computes *and* while it waits for collectives of its own. Beside one of these each gets half of
the link, so nothing is saved by that. With m seconds of such messages, w of compute and b of collectives, evenly mixed,
both kinds are under way for the part m / (w + b) of the pass, and of the messages

    b * min(1, m / (w + b))

seconds go beside collectives: what can hide is the rest. Neighbours, beside whose passes the messages really go, are
taken to be run alike, as in :mod:`asa.cost.traffic.prefetch`; then it is exact. Collectives at boundaries are not
counted, which are a matter of two components.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LEAST = 1e-30


def alongside(messages: Any, *, compute: Any, collectives: Any, least: Callable[[Any, Any], Any] = min) -> Any:
    """Seconds of ``messages`` that go beside ``collectives``, all in seconds. With ``least=numpy.minimum`` of many at
    once."""
    return collectives * least(1.0, messages / (compute + collectives + _LEAST))
