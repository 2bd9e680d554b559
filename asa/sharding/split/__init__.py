"""Tensors that ranks hold in shards but that a program can use like whole tensors, wherever that is possible."""

from __future__ import annotations

from asa.sharding.split import elements, foreach, shapes, totals
from asa.sharding.split.part import TensorPart, held_of
from asa.sharding.split.wire import Split

__all__ = ["Split", "TensorPart", "elements", "foreach", "held_of", "shapes", "totals"]
