"""Memory of a process in huge pages: to fork, the kernel copies an entry for every page, and removes it at the end."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

HUGE = 1 << 21
"""Bytes of a huge page."""
_COLLAPSE = 25
"""``MADV_COLLAPSE`` of Linux 6.1 and later."""
_OF_PROGRAM = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ \S+ 0 *(?:\[heap\])?$", re.MULTILINE)
"""Memory in ``/proc/self/maps`` that belongs to no file, to no stack and to no other process."""


def collapse() -> int:
    """Lay this process's memory into huge pages where it fills them; returns in how many. Where the system has none,
    it stays as it is."""
    found = 0
    with suppress(OSError, AttributeError):
        maps, libc = Path("/proc/self/maps").read_text(), ctypes.CDLL(None)
        for begin, end in ((int(a, 16), int(b, 16)) for a, b in _OF_PROGRAM.findall(maps)):
            for at in range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
                found += libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE), _COLLAPSE) == 0
    return found
