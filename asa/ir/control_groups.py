"""Folders of the control groups that limit this process (Linux, version 1 or 2)."""

from __future__ import annotations

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
