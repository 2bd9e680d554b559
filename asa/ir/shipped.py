"""Profiles and measured clusters that are shipped with the package, as data files.

In a clone they are links to ``profiles/``, so that there is one copy of each (docs/decisions/0060).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

FOLDER = Path(str(files("asa").joinpath("data", "profiles")))
"""Folder of the shipped files. Installers unpack packages, so it is an ordinary folder."""


def each_once(paths: Iterable[Path]) -> list[Path]:
    """``paths`` without those that resolve to the same file as an earlier one."""
    return list({path.resolve(): path for path in reversed(list(paths))}.values())[::-1]
