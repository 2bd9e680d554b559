"""Random words as a pure function of a key and an index, equal on all ranks, devices and versions.

SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) in int64 arithmetic,
which wraps modulo 2^64 on both CPU and CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shift(words: Tensor, bits: int) -> Tensor:
    """Logical shift right (torch's own is arithmetic)."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def key(*parts: int) -> int:
    """A 64-bit key made from several integers, in order."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + _GAMMA & _MASK
        state = (state ^ (state >> 30)) * _FIRST & _MASK
        state = (state ^ (state >> 27)) * _SECOND & _MASK
        state ^= state >> 31
    return state


def words(of_key: int, index: Tensor) -> Tensor:
    """Random int64 for every element of ``index`` (int64, any shape and device)."""
    state = index * _signed(_GAMMA) + _signed(of_key)
    state = (state ^ _shift(state, 30)) * _signed(_FIRST)
    state = (state ^ _shift(state, 27)) * _signed(_SECOND)
    return state ^ _shift(state, 31)


def integers(random: Tensor, low: int, high: int, *, field: int) -> Tensor:
    """Integers ``low <= n < high`` from one of the four 16-bit fields of each word. The bias is below (high - low) /
    65536."""
    return low + ((random >> (16 * field)) & 0xFFFF) * (high - low) // 65536


def noise_bytes(of_key: int, start: int, count: int) -> Tensor:
    """``count`` random bytes (uint8) from position ``start`` of the key's stream. Both must be multiples of 8."""
    return words(of_key, torch.arange(start // 8, (start + count) // 8)).view(torch.uint8)


def permutation(of_key: int, count: int) -> Tensor:
    """A permutation of 0..count-1 (int64): indices sorted by their random word."""
    return torch.argsort(words(of_key, torch.arange(count)), stable=True)
