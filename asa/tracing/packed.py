"""Positions of tokens in models of transformers, which show whether several sequences are packed into one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx


@contextmanager
def packing_looked_up(values: Callable[[fx.Node], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Context in which transformers makes no mask for packed sequences if the positions that it would inspect follow
    from shapes and show none. ``values`` returns the positions for two batch sizes, and refuses those that depend on
    data. Without this, a trace would contain a mask that a real run does not use."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def looked_up(positions: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(positions, fx.Proxy):
            return original(positions, *args, **options)
        if any(not v.is_meta and original(v, *args, **options) is not None for v in values(positions.node)):
            raise fx.proxy.TraceError("sequences are packed")
        return None

    masks.find_packed_sequence_indices = looked_up
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original
