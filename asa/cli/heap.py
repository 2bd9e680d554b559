"""The environment in which a command that trains is to run: with a heap that takes back what was freed.

glibc caches small blocks per thread. Of every aligned block, as torch asks for them, it splits a few bytes off at
either end and caches those, so that the block, once freed, is too short for the next of its own size: a step finds no
room in what the step before has left, and the heap grows to up to 3.5 times of what is in use. The cache is switched
off by a variable that glibc reads when a process starts, hence a new start (docs/decisions/0014).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

VARIABLE, SETTING = "GLIBC_TUNABLES", "glibc.malloc.tcache_count"
TRAINING = ("train", "bench", "verify", "profile")
"""First words of commands that hold a model's activations."""


def start_again(words: Sequence[str]) -> None:
    """Where ``words`` train, and glibc has not been told, replace this process by one whose glibc has."""
    if not words or words[0] not in TRAINING or sys.orig_argv[-len(words) :] != list(words):
        return  # called by a program with words of its own, it would begin from that program's beginning
    start_program_again()


def start_program_again() -> None:
    """Where glibc has not been told, replace this process, whatever program it is, by one whose glibc has."""
    present = os.environ.get(VARIABLE, "")
    if SETTING in present or not _glibc() or not sys.executable:
        return
    os.environ[VARIABLE] = ":".join(filter(None, (present, f"{SETTING}=0")))
    with suppress(OSError):  # as it is, then
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _glibc() -> bool:
    with suppress(ValueError, OSError, AttributeError):
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    return False
