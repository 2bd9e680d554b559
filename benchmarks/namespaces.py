"""Ranks in network namespaces of their own, joined by links of a stated bandwidth: Linux, root, ``ip`` and ``tc``."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from asa.launch.environments import Environment, started_in

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_BURST = "256kb"  # more than one segment as the kernel hands it on; less than a tenth of a second of any link here


class NotPermitted(Exception):
    """Why no namespaces can be made here, in one line."""


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")


def _check(result: int, what: str) -> None:
    if result:
        raise NotPermitted(f"{what}: {os.strerror(ctypes.get_errno())}")


def leave_network() -> None:
    """Move this process into an empty network of its own: what is built there vanishes with it.

    Raises:
        NotPermitted: missing rights or tools.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotPermitted(f"{tool} is not installed (iproute2)")
    _check(_LIBC.unshare(_CLONE_NEWNET), "a network namespace")
    _do("ip", "link", "set", "lo", "up")
    _do("ip", "link", "add", "name", "asabridge", "type", "bridge")
    _do("ip", "addr", "add", "10.77.0.254/24", "dev", "asabridge")
    _do("ip", "link", "set", "asabridge", "up")


def name_of(rank: int) -> str:
    """Of the namespace of a rank, within :func:`rooms`."""
    return f"asa-{os.getpid()}-{rank}"


@contextmanager
def rooms(num_ranks: int) -> Iterator[None]:
    """Inside, ranks are started each in a namespace with one link to the bridge. After :func:`leave_network`.

    Raises:
        NotPermitted: the kernel refuses.
    """

    def enter(rank: int) -> None:
        room = os.open(f"/run/netns/{names[rank]}", os.O_RDONLY)
        _check(_LIBC.setns(room, _CLONE_NEWNET), "entering a namespace")
        os.close(room)

    names = [name_of(rank) for rank in range(num_ranks)]
    made = []
    try:
        for rank, name in enumerate(names):
            _do("ip", "netns", "add", name)
            made.append(name)
            _do("ip", "link", "add", f"asa{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "link", "set", f"asa{rank}", "master", "asabridge", "up")
            _do("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "eth0", "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
        with started_in(Environment(host="10.77.0.254", interface="eth0", enter=enter)):
            yield
    finally:
        for rank, name in enumerate(made):  # the link first: with its namespace it would go only some time later
            subprocess.run(("ip", "link", "del", f"asa{rank}"), capture_output=True, check=False)
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def shape(num_ranks: int, megabits: float) -> None:
    """Every rank's link carries ``megabits`` per second in each direction from now on.

    Raises:
        NotPermitted: there is no token bucket filter.
    """
    bucket = ("root", "tbf", "rate", f"{megabits}mbit", "burst", _BURST, "latency", "100ms")
    for rank in range(num_ranks):
        _do("tc", "qdisc", "replace", "dev", f"asa{rank}", *bucket)
        _do("tc", "-n", name_of(rank), "qdisc", "replace", "dev", "eth0", *bucket)


def unshape(num_ranks: int) -> None:
    """Every rank's link carries what it can again."""
    for rank in range(num_ranks):
        _do("tc", "qdisc", "del", "dev", f"asa{rank}", "root")
        _do("tc", "-n", name_of(rank), "qdisc", "del", "dev", "eth0", "root")


@contextmanager
def shaped(num_ranks: int, megabits: float) -> Iterator[None]:
    """:func:`rooms` with every link of that bandwidth.

    Raises:
        NotPermitted: as they do.
    """
    with rooms(num_ranks):
        shape(num_ranks, megabits)
        yield
