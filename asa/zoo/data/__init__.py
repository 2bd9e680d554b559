"""Data sets: official files or the embedded default, the global order of samples, and reading samples for a rank."""

from __future__ import annotations

from asa.zoo.data.batches import fetch
from asa.zoo.data.images import ImageSet
from asa.zoo.data.order import GlobalOrder
from asa.zoo.data.split import NAMES, open_split

__all__ = ["NAMES", "GlobalOrder", "ImageSet", "fetch", "open_split"]
