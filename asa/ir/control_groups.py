"""Folders of the control groups that limit this process (Linux, version 1 or 2)."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders(controller: str) -> Iterator[tuple[int, list[Path]]]:
    """For every hierarchy that may have ``controller``: its version, and the folders of this process's group and of all
    that contain it, whether or not they are there (the path may be that of another namespace)."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = GROUPS / controller if names else GROUPS
        own = root / path.lstrip("/")
        inside = root == own or root in own.parents
        around = [p for p in own.parents if inside and (p == root or root in p.parents)]
        yield (1 if names else 2), [own, *around, root]


@functools.cache  # ranks must agree, also if a quota is changed
def cores() -> int:
    """Number of cores, rounded up, whose time the control groups of this process may use (``docker run --cpus 2``)."""
    most = float(sys.maxsize)
    for version, groups in folders("cpu"):
        for folder in groups:
            with contextlib.suppress(OSError, ValueError):  # "max", or a folder that is not there
                if version == 2:
                    texts = (folder / "cpu.max").read_text().split()
                else:
                    texts = [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
                quota, period = map(int, texts)
                most = min(most, quota / period) if quota > 0 else most
    return math.ceil(most)
