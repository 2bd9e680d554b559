"""What a batch is made of, which is there until it is ready."""

from __future__ import annotations

from asa.ir.graph import LayerGraph

_FLOAT, _PLACE = 4, 8
"""Bytes of a value of the input, and of where an image's pixel comes from once the image is shifted and mirrored."""


def made_ready(graph: LayerGraph) -> float:
    """The most bytes that are there while an input is made ready, beyond its own, as a share of those.

    Images are stored as bytes. While they are shifted and mirrored they are there twice, beside the place that each
    pixel comes from and whether that lies inside, which is turned into a byte, too; then they are turned into numbers.
    Labels of tokens are as large as the tokens.

    Of three channels: 2 * 3 + 8 + 2 bytes a pixel, then 3 and 12 of numbers: 16 where 12 are left.
    """
    if len(graph.input_shape) != 3:
        return 1.0
    channels = graph.input_shape[0]
    ready = _FLOAT * channels
    most = max(2 * channels + _PLACE + 2, channels + ready)
    return (most - ready) / ready
