"""Messages that could be hidden behind a pass, on links over which the pass itself sends.

Where a component is split by tensors and by data over the same links, its gradients, or the weights gathered for it,
are under way while it computes *and* while it waits for its own collectives. Beside a collective each gets half of the
link, which saves nothing. With m seconds of such messages, w of compute and b of collectives, evenly mixed, both kinds
are under way for the part m / (w + b) of the pass, and of the messages

    b * min(1, m / (w + b))

seconds run beside collectives; the rest can be hidden. The messages really run beside the neighbours' passes, which are
taken to be alike, as in :mod:`asa.cost.traffic.prefetch`; then the formula is exact. Collectives at boundaries are not
counted: they depend on two components.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LEAST = 1e-30


def alongside(messages: Any, *, compute: Any, collectives: Any, least: Callable[[Any, Any], Any] = min) -> Any:
    """Seconds of ``messages`` that run beside ``collectives``; all in seconds. ``least`` is ``numpy.minimum`` for
    arrays."""
    return collectives * least(1.0, messages / (compute + collectives + _LEAST))
