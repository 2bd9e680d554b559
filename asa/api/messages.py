"""Messages to the user's program: one line per phase of its start, on standard error, from rank 0 only; and errors,
which name the arguments of a call where those of a command name its options."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from asa.api.rank_context import RankContext
from asa.errors import AsaError
from asa.ir.units import GIB

_ARGUMENTS = {
    "classes": "num_classes", "cluster": "cluster", "device": "device", "global-batch": "batch_size",
    "gpus": "--nproc-per-node", "memory": "memory_bytes", "out": "out", "pin": "pins", "precision": "precision",
    "resume": "resume=True", "strategies": "strategies", "time-limit": "time_limit_s",
}  # fmt: skip
"""What a program gives in place of an option: an argument of :class:`asa.Job`, of its loader, or the number of
processes that ``torchrun`` starts."""
_OF_PLAN = {**_ARGUMENTS, "global-batch": "global_batch", "gpus": "gpus"}
"""What a program gives to :func:`asa.plan`, which has no loader and no processes."""
_NAMED = "|".join(f"(?<=--{option} )" for option in ("strategies", "precision", "device"))
_OPTION = re.compile(
    rf"`[^`]*`|--(?P<option>{'|'.join(_ARGUMENTS)})(?![\w-])"
    rf"(?: (?:(?P<number>\d+(?:\.\d+)?)(?:GiB)?|(?:{_NAMED})(?P<name>[\w:=]+(?:,[\w:=]+)*)))?"
)
"""An option with its number or name, or a whole command between backticks, which stays as it is."""


def say(context: RankContext, text: str) -> None:
    """Write one line to standard error, on rank 0."""
    if context.rank == 0:
        sys.stderr.write(f"asa: {' '.join(in_python(text).split())}\n")
        sys.stderr.flush()


def in_python(text: str, *, of_plan: bool = False) -> str:
    """``text`` with arguments of :class:`asa.Job`, or of :func:`asa.plan`, in place of options of commands.

    >>> in_python("try --global-batch 16 or --memory 1.5GiB; see `asa plan --gpus 2`")
    'try batch_size=16 or memory_bytes=1610612736; see `asa plan --gpus 2`'
    """

    def put(found: re.Match[str]) -> str:
        option, number, name = found["option"], found["number"], found["name"]
        if option is None:
            return found[0]
        argument = (_OF_PLAN if of_plan else _ARGUMENTS)[option]
        if option == "memory" and number:
            number = str(int(float(number) * GIB))
        if number:
            return f"{argument}{' ' if argument[0] == '-' else '='}{number}"
        return f"{argument}={name!r}" if name else argument

    return _OPTION.sub(put, text.replace("learning rate with --lr", "learning rate of the optimizer"))


@contextmanager
def naming_arguments(*, of_plan: bool = False) -> Iterator[None]:
    """Context (and decorator) in which errors name the arguments of the call, as :func:`in_python`."""
    try:
        yield
    except AsaError as error:
        error.args = (in_python(str(error), of_plan=of_plan), *error.args[1:])
        raise
