"""Programs that were made for several processes scale numbers by how many there are. Batches of ``asa.parallelize`` are
those of one device, so that such numbers are others than on one."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from asa.api.messages import say
from asa.api.patching import replace_once
from asa.api.rank_context import RankContext

_ASKS = re.compile(r"(?<!def )\bget_world_size\(|['\"]WORLD_SIZE['\"]")
_PARTS = (b"get_world_size(", b"WORLD_SIZE")
"""A file that ``_ASKS`` finds something in has one of these. Looking for them takes a tenth of the time."""
_MOST_BYTES = 1 << 20
"""Largest file that is looked through."""
_OF_OTHERS = ("-packages", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Parts of the paths of files that are not the program's own; most files have the first one."""
_to_tell: list[RankContext] = []
"""The ranks of the last call, until the line was printed."""


def tell_of_process_counts(context: RankContext) -> None:
    """Print once that a program asks for the number of processes: now if its script or a module of its own has such
    words, or where it calls ``torch.distributed.get_world_size``."""
    if context.ranks == 1:
        return
    _to_tell[:] = [context]
    if any(map(_asks, _own_files())):
        _tell()
    replace_once(dist, "get_world_size", _noticed)


def _noticed(original: Callable[..., int]) -> Callable[..., int]:
    def get_world_size(*args: Any, **options: Any) -> int:
        if _to_tell:
            asking = sys._getframe(1)
            library = asking.f_globals.get("__name__", "").partition(".")[0] in ("asa", "torch")
            if not library and "-packages" not in asking.f_code.co_filename:
                _tell()
        return original(*args, **options)

    return get_world_size


def _own_files() -> list[str]:
    """The files of the script and of the modules that the program has imported, without those of packages. Of a package
    only the module of its own name is looked at: ranks have thousands of others."""
    names = list(sys.modules)
    others = {"asa", *(name for name in names if "." not in name and _is_of_others(_file_of(name)))}
    files = (_file_of(name) for name in names if name.partition(".")[0] not in others)
    return [file for file in files if isinstance(file, str) and not _is_of_others(file)]


def _file_of(name: str) -> Any:
    return getattr(sys.modules.get(name), "__dict__", {}).get("__file__")


def _is_of_others(file: Any) -> bool:
    return isinstance(file, str) and any(part in file for part in _OF_OTHERS)


def _asks(file: str) -> bool:
    with suppress(OSError, ValueError):
        path = Path(file)
        if path.stat().st_size <= _MOST_BYTES:
            text = path.read_bytes()
            return any(part in text for part in _PARTS) and bool(_ASKS.search(text.decode(errors="ignore")))
    return False


def _tell() -> None:
    context = _to_tell.pop()
    say(context, f"the program asks how many processes there are ({context.ranks}): a rate, a batch size or steps of "
        "accumulation that it sets by that are others than on one device, whose batches the loader yields, shared by "
        "ranks")  # fmt: skip
