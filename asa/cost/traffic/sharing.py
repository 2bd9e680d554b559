"""Messages that cannot be hidden behind a pass because the pass sends over the same links.

If tensor and data parallelism of a component use the same links, gradients or gathered weights are sent while the
component computes *and* during its own collectives. During a collective each gets half of the link, so nothing is
saved. The messages run during the share m / (w + b) of the pass, so of their m seconds

    b * min(1, m / (w + b))

coincide with collectives, and only the rest can be hidden. Here m, w and b are seconds of messages, compute and
collectives, evenly mixed. In fact the messages run during the neighbours' passes; the formula is exact if these are
alike, as :mod:`asa.cost.traffic.prefetch` assumes. Collectives at boundaries depend on two components and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LEAST = 1e-30


def alongside(messages: Any, *, compute: Any, collectives: Any, least: Callable[[Any, Any], Any] = min) -> Any:
    """Seconds of ``messages`` (m) that coincide with ``collectives`` (b); ``compute`` is w. All are in seconds.
    ``least``: ``numpy.minimum`` for arrays."""
    return collectives * least(1.0, messages / (compute + collectives + _LEAST))
