"""Processes of ranks: start them, join those of a launcher, send messages to the parent, find the rank that failed.

::

    results = run_ranks(4, function, *args)      # function(rank, *args) on 4 forked ranks of one gloo group
    tell({"loss": 0.7})                          # on a rank: handed to run_ranks(..., on_message=f) as f(rank, message)
    with join() as place: ...                    # under torchrun: its process group, or an existing one
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asa.launch.devices import bind_to_core, cuda_devices, usable_cores
    from asa.launch.heap import give_back_freed_memory, keep_freed_memory
    from asa.launch.ranks import run_ranks
    from asa.launch.torchrun import TorchrunRank, join, launched
    from asa.launch.worker import Latecomer, latecomer, or_fail, store_of_ranks, tell

__all__ = [
    "Latecomer",
    "TorchrunRank",
    "bind_to_core",
    "cuda_devices",
    "give_back_freed_memory",
    "join",
    "keep_freed_memory",
    "latecomer",
    "launched",
    "or_fail",
    "run_ranks",
    "store_of_ranks",
    "tell",
    "usable_cores",
]

_HOMES = {
    "devices": ("bind_to_core", "cuda_devices", "usable_cores"),
    "heap": ("give_back_freed_memory", "keep_freed_memory"),
    "ranks": ("run_ranks",),
    "torchrun": ("TorchrunRank", "join", "launched"),
    "worker": ("Latecomer", "latecomer", "or_fail", "store_of_ranks", "tell"),
}
"""Exported names by module, imported at first use: to count devices costs no import of torch, which takes seconds."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"asa.launch.{module}"), name)
    raise AttributeError(f"module 'asa.launch' has no attribute {name!r}")
