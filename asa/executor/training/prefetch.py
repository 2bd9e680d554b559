"""Prefetching of images that do not fit on the device: a thread gathers the next batch while the device computes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from asa.zoo.data import ImageSet

Gathered = tuple[Tensor, Tensor]
"""Pixels uint8 [B, C, H, W] and labels int64 [B], on the host."""


class Prefetcher:
    """Prefetches batches of ``images`` in host memory. With ``pin`` they are in page-locked memory, from which a copy
    to the device is asynchronous."""

    def __init__(self, images: ImageSet, *, pin: bool) -> None:
        self._images, self._pin = images, pin
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="asa-data")
        self._coming: deque[tuple[Tensor, Future[Gathered]]] = deque(maxlen=2)

    @staticmethod
    def of(images: ImageSet, device: torch.device) -> Prefetcher | None:
        """A prefetcher from ``images`` to ``device``; None if the images are already there, or the device is a CPU."""
        away = device.type == "cuda" and images.images.device.type == "cpu"
        return Prefetcher(images, pin=True) if away else None

    def expect(self, indices: Tensor) -> None:
        """Start to gather the samples ``indices`` for the step after this one. The two latest batches are kept."""
        self._coming.append((indices, self._pool.submit(self._gather, indices)))

    def take(self, indices: Tensor) -> Gathered | None:
        """The samples ``indices``, after waiting until they are gathered. None if :meth:`expect` was not called for
        them."""
        for i, (expected, batch) in enumerate(self._coming):
            if torch.equal(expected, indices):
                del self._coming[i]
                return batch.result()
        return None

    def _gather(self, indices: Tensor) -> Gathered:
        images, labels = self._images.images, self._images.labels
        pixels = torch.empty((len(indices), *images.shape[1:]), dtype=images.dtype, pin_memory=self._pin)
        torch.index_select(images, 0, indices, out=pixels)
        return pixels, labels[indices]
