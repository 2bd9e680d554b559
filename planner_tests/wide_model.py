"""A model of many activations and few weights, whose rank 1 may be given little memory: for runs that run out of it."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from torch import Tensor, nn

INPUT = (1, 32, 32)
LIMIT = "WIDE_MODEL_LIMIT_BYTES"
"""Of rank 1, beyond what it holds in its first step; in the environment."""


class _Layer(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh()


class _First(_Layer):
    """Limits its process, in its first step: by then all threads have their stacks."""

    def forward(self, x: Tensor) -> Tensor:
        training = len(x) > 16  # and not tracing
        if LIMIT in os.environ and os.environ.get("RANK") == "1" and training and not _limited:
            held = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
            assert held is not None
            limit = 1024 * int(held.group(1)) + int(os.environ[LIMIT])
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            _limited.append(limit)
        return super().forward(x)


_limited: list[int] = []


def wide(num_classes: int = 10) -> nn.Module:
    """Activations of 64 KiB a sample and tensor; 96 MiB of them for 128 samples."""
    return nn.Sequential(
        _First(1, 16), _Layer(16, 16), _Layer(16, 16), _Layer(16, 16), _Layer(16, 16), _Layer(16, 16),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(1), nn.Linear(64, num_classes),
    )  # fmt: skip
