"""Ways for a device to compute a component: they change times, and results only by rounding."""

from __future__ import annotations

from typing import Literal

MemoryFormat = Literal["contiguous", "channels_last"]
"""Order of an image's values in memory: channel by channel, or pixel by pixel, which tensor cores read faster."""
Compiled = Literal["none", "components", "whole", "graphs"]
"""What torch.compile does: nothing; compile each component; the whole model as one, on one device; or each component,
and replay its kernels as one CUDA graph, which saves the time of launching each."""


def execution(memory_format: MemoryFormat, compiled: Compiled) -> str:
    """Description of the settings in a few words; empty for torch's defaults.

    >>> execution("contiguous", "none"), execution("channels_last", "components")
    ('', 'channels_last, compiled')
    """
    words = {"none": "", "components": "compiled", "whole": "compiled as one", "graphs": "CUDA graphs"}[compiled]
    return ", ".join(filter(None, ("" if memory_format == "contiguous" else memory_format, words)))
