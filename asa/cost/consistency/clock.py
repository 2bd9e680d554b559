"""A discipline of consistency on a machine, as a discrete-event simulation: asynchronous runs have no closed form.

Everything is deterministic: a seed draws what steps take, and draws the same under every discipline.
"""

from __future__ import annotations

from asa.cost.consistency.meetings import met
from asa.cost.consistency.played import Machine, Played
from asa.cost.consistency.served import Served
from asa.errors import UsageError
from asa.ir.consistency import Discipline

STEPS = 48
"""Global batches of a run, where there is no reason for more."""


def play(discipline: Discipline | None, machine: Machine, *, steps: int = STEPS, seed: int = 0) -> Played:
    """The outcome of ``steps`` global batches. Without a discipline all workers add up their gradients after every
    step.

    Raises:
        UsageError: the discipline needs servers and the machine has none, or the other way round, or it needs stages.
    """
    if discipline is None:
        return met(Discipline(name="local_sgd"), machine, seed, steps)
    if discipline.waiting == "pipelined":
        raise UsageError(f"{discipline.name} is priced by the clock of its stages, not by that of workers")
    if len(machine.servers) != discipline.servers:
        raise UsageError(f"{discipline.name} has {discipline.servers} servers, the machine {len(machine.servers)}")
    if discipline.waiting == "local":
        return met(discipline, machine, seed, steps)
    return Served(discipline, machine, seed).run(steps)
