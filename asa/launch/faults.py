"""Fault injection, for tests of how a run handles failures.

``ASA_FAULT="KIND[:ARGUMENT]@rank=R,step=N,point=P,once=FILE"``; several are separated by ``;``. The fault occurs when a
rank reaches a point that meets all conditions (omitted ones always hold). ``once``: the first time only, also across
restarts: the file is then created, with a line that says what happened. Without ``ASA_FAULT`` nothing is looked up.

==================  ==================================================================================================
``exception:TEXT``  a ``RuntimeError``
``memory``          a ``MemoryError``
``disk``            an ``OSError``: no space left on device
``kill``            SIGKILL; ``segfault``: SIGSEGV; ``stop``: SIGSTOP; ``term``: SIGTERM; ``signal:NAME``: any other
``parent:NAME``     that signal to the process that started the ranks (SIGKILL if not named)
``exit:CODE``       exit without a report, with code 0 if not given
``hang:SECONDS``    sleeps, for a day if not given; ``gil``: the same while holding the interpreter lock
==================  ==================================================================================================

Points: ``rendezvous`` (on joining the others), ``restore``, ``data``, ``forward``, ``backward``, ``all_reduce``
(gradients are ready), ``optimizer``, ``validation``, ``checkpoint.begin`` (on every rank; the others on rank 0, which
writes), ``checkpoint.files``, ``checkpoint.manifest`` (all written, nothing visible), ``checkpoint.commit`` (all have
voted for it), ``checkpoint.renamed``, ``checkpoint.done``, ``replan.agree`` (after every epoch), ``replan.solve``,
``replan.build``, ``replan.move``, ``replan.swap``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from asa.errors import UsageError
from asa.launch import alive

VARIABLE = "ASA_FAULT"
POINTS = (
    "rendezvous", "restore", "data", "forward", "backward", "all_reduce", "optimizer", "validation",
    "checkpoint.begin", "checkpoint.files", "checkpoint.manifest", "checkpoint.commit", "checkpoint.renamed",
    "checkpoint.done", "replan.solve", "replan.agree", "replan.build", "replan.move", "replan.swap",
)  # fmt: skip
_SIGNALS = {"kill": "SIGKILL", "segfault": "SIGSEGV", "stop": "SIGSTOP", "term": "SIGTERM"}
_KINDS = ("exception", "memory", "disk", *_SIGNALS, "signal", "parent", "exit", "hang", "gil")
_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and its conditions. ``rank`` and ``step`` (updates since the start of the run): None for any."""

    kind: str
    argument: str
    rank: int | None
    step: int | None
    point: str | None
    once: Path | None


class _Armed:
    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.step: int | None = None


_armed = _Armed()


def arm(text: str | None = None) -> None:
    """Activate the faults in ``text`` (default: the environment variable), here and in ranks forked from here.

    Raises:
        UsageError: ``text`` cannot be parsed.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    _armed.faults = [_parsed(part.strip()) for part in text.split(";") if part.strip()]


def at_step(step: int) -> None:
    """Set the current step for the points reached from here on."""
    alive.at_step(step)
    if _armed.faults:
        _armed.step = step


def reached(point: str) -> None:
    """Count a heartbeat at the named ``point``, and cause the faults whose conditions are met."""
    alive.beat()
    if _armed.faults:
        rank = int(os.environ.get("RANK", "0"))
        for fault in _armed.faults:
            conditions = ((fault.rank, rank), (fault.step, _armed.step), (fault.point, point))
            if all(value in (None, now) for value, now in conditions) and _first(fault, rank, point):
                _suffer(fault)


def _parsed(text: str) -> Fault:
    what, _, where = text.partition("@")
    kind, _, argument = what.partition(":")
    conditions = dict.fromkeys(("rank", "step", "point", "once"), "")
    for part in filter(None, where.split(",")):
        key, _, value = part.partition("=")
        if key.strip() not in conditions or not value:
            raise UsageError(f"{VARIABLE}: {part!r} is none of rank=, step=, point= and once= with a value")
        conditions[key.strip()] = value.strip()
    named = "SIGKILL" if kind == "parent" and not argument else argument
    if kind not in _KINDS:
        raise UsageError(f"{VARIABLE}: {kind!r} is no kind of fault; there is {', '.join(_KINDS)}")
    if kind in ("signal", "parent") and named not in signal.Signals.__members__:
        raise UsageError(f"{VARIABLE}: {named!r} is no signal; write {kind}:SIGTERM")
    if conditions["point"] and conditions["point"] not in POINTS:
        raise UsageError(f"{VARIABLE}: {conditions['point']!r} is no point; there is {', '.join(POINTS)}")
    try:
        rank, step = (int(conditions[k]) if conditions[k] else None for k in ("rank", "step"))
        if kind in ("exit", "hang") and argument:
            float(argument) if kind == "hang" else int(argument)
    except ValueError as error:
        raise UsageError(f"{VARIABLE}: {text!r}: {error}") from None
    once = Path(conditions["once"]) if conditions["once"] else None
    return Fault(kind=kind, argument=named, rank=rank, step=step, point=conditions["point"] or None, once=once)


def _first(fault: Fault, rank: int, point: str) -> bool:
    """Whether the fault is to occur now (with ``once``: for the first time); writes a line about it."""
    line = f"{fault.kind} on rank {rank} at {point}, step {_armed.step}\n"
    if fault.once is not None:
        try:
            with fault.once.open("x", encoding="utf-8") as stream:
                stream.write(line)
        except FileExistsError:
            return False
    sys.stderr.write(f"asa: {VARIABLE}: {line}")
    sys.stderr.flush()
    return True


def _suffer(fault: Fault) -> None:
    match fault.kind:
        case "exception":
            raise RuntimeError(fault.argument or f"asked for by {VARIABLE}")
        case "memory":
            raise MemoryError(f"asked for by {VARIABLE}")
        case "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "parent":
            os.kill(os.getppid(), signal.Signals[fault.argument])
        case "exit":
            os._exit(int(fault.argument or 0))
        case "hang":
            time.sleep(float(fault.argument or _DAY_S))
        case "gil":
            ctypes.PyDLL(None).sleep(int(float(fault.argument or _DAY_S)))
        case kind:
            os.kill(os.getpid(), signal.Signals[_SIGNALS.get(kind, fault.argument)])
