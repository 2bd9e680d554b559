"""Ranks keep what they free: a large block is faulted in once, and not at every step."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from asa.launch import run_ranks

_BYTES = 64 << 20


def _faults(_rank: int) -> int:
    for _ in range(16):  # aligned blocks do not fit where one of their size was: a few are needed
        torch.empty(_BYTES, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(_BYTES, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is told so, nobody else's")
def test_a_rank_takes_a_large_block_from_what_it_freed():
    pages = 8 * _BYTES // resource.getpagesize()
    assert run_ranks(1, _faults)[0] < pages / 20
