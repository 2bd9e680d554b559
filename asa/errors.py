"""All errors that users can get, with the exit code of a command for each.

    AsaError                 1   a bug, or an unforeseen error
    ├── UsageError           2   the command line, or the arguments of a Python call
    ├── InvalidInputError    3   a file or a model that cannot be used; names the place inside it
    ├── InfeasibleError      4   no plan fits; names the binding constraint and the nearest remedy
    ├── UnavailableError     5   the machine lacks what was asked for
    ├── WorkersFailedError   6   a worker died or hung; names the rank
    │   └── ExhaustedError   6   a worker ran out of memory
    ├── NoCheckpointError    7   nothing valid to resume from
    └── PreemptedError      75   asked to stop; the state is saved

A message is one line: what was asked, the number that decides, the remedy.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType
from typing import ClassVar

TRAINING = "asa-parallel[train]"
"""Package to install for everything that runs a model."""

_EXTRAS = {"torch": TRAINING, "torchvision": TRAINING, "networkx": TRAINING, "matplotlib": TRAINING,
           "tensorboard": "asa-parallel[tensorboard]", "wandb": "asa-parallel[wandb]", "mlflow": "asa-parallel[mlflow]",
           "pyarrow": "asa-parallel[parquet]"}  # fmt: skip
"""Packages that an installation may lack, and what installs them."""

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"


class AsaError(Exception):
    """Base class of all errors of asa. ``exit_code`` is what the command line returns."""

    exit_code: ClassVar[int] = 1


class UsageError(AsaError):
    """The request is wrong: an unknown name, an impossible number."""

    exit_code: ClassVar[int] = 2


class InvalidInputError(AsaError):
    """A given file or model cannot be used. ``where`` is the JSON path or byte position, if there is one."""

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, where: str | None = None) -> None:
        self.where = where
        super().__init__(message if where is None else f"{message} (at {where})")


class InfeasibleError(AsaError):
    """No plan satisfies the constraints."""

    exit_code: ClassVar[int] = 4


class UnavailableError(AsaError):
    """The environment lacks a device, a solver, a package or a port."""

    exit_code: ClassVar[int] = 5


class WorkersFailedError(AsaError):
    """A worker process died, hung or disagreed. ``rank``: the first one known to have caused it; ``step``: the step it
    was in (0: none yet; None: unknown); ``signal``: the signal that killed it, if any. ``lost``: it is gone, or hangs;
    ``raised``: it failed with an error outside asa's code, which may not occur again. ``stopping``: ranks were asked to
    stop before."""

    exit_code: ClassVar[int] = 6
    stopping = False

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        signal: int | None = None,
        lost: bool = False,
        raised: bool = False,
    ) -> None:
        self.rank, self.step, self.signal, self.lost, self.raised = rank, step, signal, lost, raised
        super().__init__(message)


class ExhaustedError(WorkersFailedError):
    """A worker ran out of memory. ``shortage`` is an :class:`asa.ir.shortage.Shortage`."""

    def __init__(self, message: str, *, rank: int | None = None, shortage: object = None) -> None:
        self.shortage = shortage
        super().__init__(message, rank=rank)


class NoCheckpointError(AsaError):
    """No checkpoint passed validation."""

    exit_code: ClassVar[int] = 7


class PreemptedError(AsaError):
    """The run was stopped on request; everything needed to resume is saved."""

    exit_code: ClassVar[int] = 75


def place_of(error: BaseException) -> str:
    """Text `` (model.py:12)``: the innermost line of the user's own code in the traceback of ``error``; empty without
    one."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((_place(f.filename, f.lineno) for f in frames if _of_the_user(f.filename)), "")


def place_of_call() -> str:
    """Text `` (train.py:31)``: the innermost line of the user's own code that runs now; empty without one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _of_the_user(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno)


def _of_the_user(file: str) -> bool:
    return not (file.startswith((_HERE, "<")) or _INSTALLED in file or f"{os.sep}lib{os.sep}python" in file)


def _place(file: str, line: int | None) -> str:
    return f" ({os.path.basename(file)}:{line})"


def lacking(package: str, what: str = "this") -> str:
    """Message that ``package``, which ``what`` needs, is not installed.

    >>> lacking("torch.nn")
    "this needs torch, which is not installed: pip install 'asa-parallel[train]'"
    """
    name = package.partition(".")[0]
    return f"{what} needs {name}, which is not installed: pip install '{_EXTRAS.get(name, name)}'"
