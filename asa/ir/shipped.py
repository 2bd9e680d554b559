"""Profiles and measured clusters that come with the package, as files: data of it, found wherever it is installed.

In a clone they are links to ``profiles/``, so that there is one copy of each (docs/decisions/0060).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

FOLDER = Path(str(files("asa").joinpath("data", "profiles")))
"""Where they lie. Installers unpack packages, so this is a folder of the file system."""


def each_once(paths: Iterable[Path]) -> list[Path]:
    """``paths`` without those that lead to a file an earlier one leads to."""
    return list({path.resolve(): path for path in reversed(list(paths))}.values())[::-1]
