"""Step times under disciplines of consistency, in which workers need not take every step together.

Asynchronous runs have no closed form, so a discipline is simulated event by event. The simulation is deterministic: the
times of steps are drawn with a seed, the same ones under every discipline.
"""

from __future__ import annotations

from asa.cost.consistency.meetings import met
from asa.cost.consistency.played import Machine, Played, Server, Worker
from asa.cost.consistency.served import Served
from asa.errors import UsageError
from asa.ir.consistency import Discipline

STEPS = 48
"""Default number of global batches of a simulated run."""


def play(discipline: Discipline | None, machine: Machine, *, steps: int = STEPS, seed: int = 0) -> Played:
    """Simulate ``steps`` global batches. Without a discipline all workers average their gradients after every step.

    Raises:
        UsageError: the discipline needs another number of servers than the machine has, or it is pipelined.
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


__all__ = ["Machine", "Played", "Server", "Worker", "play"]
