"""Restart of commands that train, with a heap setting that lets freed memory be reused.

glibc caches small blocks per thread. It splits a few bytes off either end of every aligned block, as torch requests
them, and caches those pieces, so that the block, once freed, is too short for the next one of the same size: a step
cannot reuse the memory of the step before, and the heap grows up to 3.5 times. Heaps of threads hold 64 MiB at most, so
glibc maps larger blocks of a thread anew. Both are switched off by a variable that glibc reads when a process starts,
hence the restart (docs/decisions/0014).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

VARIABLE = "GLIBC_TUNABLES"
SETTINGS = {"glibc.malloc.tcache_count": "0", "glibc.malloc.arena_max": "1"}
TRAINING = ("train", "bench", "verify", "profile")
"""First words of commands that hold a model's activations."""


def start_again(words: Sequence[str]) -> None:
    """If ``words`` are a command that trains and a setting is missing, replace this process by one with it."""
    if not words or words[0] not in TRAINING or sys.orig_argv[-len(words) :] != list(words):
        return  # called from another program, whose own start would be repeated
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # Ctrl-C while Python starts would print a traceback
    start_program_again()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def start_program_again() -> None:
    """If a setting is missing, replace this process, whatever program it is, by one with it."""
    present = os.environ.get(VARIABLE, "")
    missing = [f"{name}={value}" for name, value in SETTINGS.items() if name not in present]
    if not missing or not _glibc() or not sys.executable:
        return
    os.environ[VARIABLE] = ":".join(filter(None, (present, *missing)))
    with suppress(OSError):  # continue without the setting
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _glibc() -> bool:
    with suppress(ValueError, OSError, AttributeError):
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    return False
