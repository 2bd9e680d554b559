"""Discrete-event simulation of workers that pull weights from servers and push gradients to them.

In a cycle a worker waits while the age of some worker's gradient has reached the window, then pulls, computes
``period`` steps and pushes. A server's link receives the gradients of one worker at a time, and sends the weights for
one at a time, in order of arrival; where workers take all steps together, weights for all share the link and arrive
together. Its processor applies one push at a time. A worker pulls again when its push is applied. Under a synchronous
discipline the servers add up the pushes of all workers and update once.

A server that shares a worker's device exchanges no messages with it. While both have work, each has half of the
processor. Without servers (``hogwild``) every worker writes to shared memory: there are no queues, and each worker
computes its updates.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field

from asa.cost.consistency.played import Draws, Machine, Played, counted, late_rate
from asa.ir.consistency import Discipline


@dataclass
class _Worker:
    clock: int = 0
    pulled: float = 0.0
    """Samples of other workers that had been applied when it asked for the weights."""
    own_rows: float = 0.0
    late_s: float = 0.0
    """Seconds by which a server on its device delayed its current step."""
    computing: bool = False
    rejected: bool = False
    blocked_since: float | None = None
    waited_s: float = 0.0
    finished: list[tuple[float, float]] = field(default_factory=list)


class Served:
    """The state and events of one run."""

    def __init__(self, discipline: Discipline, machine: Machine, seed: int) -> None:
        self.discipline, self.machine = discipline, machine
        self._draws = Draws(machine, seed)
        self._workers = [_Worker() for _ in machine.workers]
        self._events: list[tuple[float, int, str, int]] = []
        self._count = 0
        servers, workers = machine.servers, range(len(machine.workers))
        self._remote = [[(j, s) for j, s in enumerate(servers) if s.beside != w] for w in workers]
        self._num_remote = [sum(s.beside != w for w in workers) for s in servers]
        self._sending, self._receiving, self._applying = ([0.0] * len(servers) for _ in range(3))
        self._arrived: list[tuple[int, float]] = []
        self.applied = 0.0
        """Samples whose update is finished: pulled weights contain them."""
        self._accepted = 0.0
        """Samples whose update is finished or has begun."""
        self.now = 0.0
        self._ages: list[int] = []
        self._exact_ages: list[float] = []
        self._slowest = 0
        self._at_clock = Counter({0: len(self._workers)})
        self._blocked: set[int] = set()
        self._rejected = 0
        self._batch = machine.rows
        self._begun: deque[tuple[int, int, float]] = deque()
        """Workers that compute, with their clock and the rows that had been applied when they pulled, oldest first."""

    def run(self, steps: int) -> Played:
        """Simulate until ``steps`` global batches are applied and every worker has finished a cycle or two."""
        batch, count = self._batch, len(self._workers)
        for w in range(count):
            self._begin(w, 0.0)
        most = 4 * (steps * count + 10 * count)
        cycles = 0
        while self._events and (self.applied < steps * batch * (1 - 1e-12)):
            self.now, _, kind, w = heapq.heappop(self._events)
            if kind == "computed":
                self._push(w)
            elif kind == "arrived":
                self._apply(w)
            else:
                cycles += 1
                self._finished(w)
                if cycles > most:  # all is rejected
                    break
        rate = late_rate([w.finished for w in self._workers])
        return Played(
            seconds=self.now,
            steps=self.applied / batch,
            step_time_s=batch / rate if rate > 0 else float("inf"),
            ages=counted(self._ages),
            mean_age=sum(self._exact_ages) / len(self._exact_ages) if self._exact_ages else 0.0,
            rejected=self._rejected / max(1, self._rejected + len(self._ages)),
            waited=tuple(w.waited_s / self.now if self.now else 0.0 for w in self._workers),
        )

    def _at(self, time: float, kind: str, w: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, kind, w))

    def _begin(self, w: int, now: float) -> None:
        """Start a cycle of worker ``w``: it pulls and computes, or it waits because of the window."""
        me, machine = self._workers[w], self.machine
        lead = me.clock - self._slowest
        if self._held_up(lead):
            me.blocked_since = now if me.blocked_since is None else me.blocked_since
            self._blocked.add(w)
            return
        if me.blocked_since is not None:
            me.waited_s += now - me.blocked_since
            me.blocked_since = None
            self._blocked.discard(w)
        me.pulled = self.applied - me.own_rows
        received_s = now + machine.workers[w].pull_s
        for j, server in self._remote[w]:
            self._sending[j] = max(now, self._sending[j]) + self._shared(j, server.send_s, server.handling_s)
            together_s = now + self._num_remote[j] * server.send_s
            received_s = max(received_s, together_s if self.discipline.lockstep else self._sending[j])
        compute = self._draws.steps(w, self.discipline.period) + machine.workers[w].copy_s
        if self.discipline.period > 1:
            compute += self.discipline.period * machine.workers[w].update_s
        me.computing = True
        self._begun.append((w, me.clock, self.applied))
        self._at(received_s + compute, "computed", w)

    def _held_up(self, lead: int) -> bool:
        """Whether a worker must wait: the age of another's gradient has reached the window, or, with a window of 0,
        some worker is behind."""
        window = self.discipline.window
        if not window:
            return window == 0 and lead > 0
        while self._begun and not self._under_way(*self._begun[0][:2]):
            self._begun.popleft()
        limit = window * self._batch * (1 - 1e-12)
        return bool(self._begun) and self._accepted - self._begun[0][2] >= limit

    def _under_way(self, w: int, clock: int) -> bool:
        return self._workers[w].computing and self._workers[w].clock == clock

    def _push(self, w: int) -> None:
        me, worker = self._workers[w], self.machine.workers[w]
        if me.late_s > 0:
            late, me.late_s = me.late_s, 0.0
            self._at(self.now + late, "computed", w)
            return
        me.computing = False
        sent = self.now + worker.push_s
        for j, server in self._remote[w]:
            took = self._shared(j, server.receive_s, server.handling_s)
            self._receiving[j] = max(self.now, self._receiving[j]) + took
            sent = max(sent, self._receiving[j])
        self._at(sent, "arrived", w)

    def _apply(self, w: int) -> None:
        """Apply or reject the gradients of worker ``w``, which have arrived."""
        if self.discipline.synchronous:
            self._arrived.append((w, self.now))
            if len(self._arrived) == len(self._workers):
                done = self._updated(self.now)
                for other, since in self._arrived:
                    self._workers[other].waited_s += self.now - since
                    self._at(done, "applied", other)
                self._arrived = []
            return
        me, worker, limit = self._workers[w], self.machine.workers[w], self.discipline.max_age
        age = (self._accepted - me.own_rows - me.pulled) / self._batch
        if limit is not None and int(age + 1e-9) > limit:
            me.rejected = True
            self._rejected += 1
            self._at(self.now, "applied", w)
            return
        self._aged(age)
        self._accepted += worker.rows * self.discipline.period
        self._at(self._updated(self.now) if self.machine.servers else self.now + worker.update_s, "applied", w)

    def _aged(self, age: float) -> None:
        self._exact_ages.append(age)
        self._ages.append(int(age + 1e-9))

    def _updated(self, now: float) -> float:
        """The time at which all servers have applied an update that arrived ``now``."""
        done = now
        for j, server in enumerate(self.machine.servers):
            start = max(now, self._applying[j])
            self._applying[j] = start + self._shared(j, server.apply_s, server.apply_s)
            done = max(done, self._applying[j])
        return done

    def _shared(self, j: int, alone_s: float, work_s: float) -> float:
        """Seconds that server ``j`` takes for ``alone_s`` seconds that keep its processor busy for ``work_s``. A worker
        that computes on the same device is later by ``work_s``."""
        beside = self.machine.servers[j].beside
        if beside is None or not self._workers[beside].computing:
            return alone_s
        self._workers[beside].late_s += work_s
        return alone_s + work_s

    def _finished(self, w: int) -> None:
        """Continue with ``w``, whose push was applied or rejected, and with the workers that waited for it."""
        me = self._workers[w]
        rows = 0.0 if me.rejected else self.machine.workers[w].rows * self.discipline.period
        if self.discipline.synchronous:
            self._aged(0.0)
        me.rejected = False
        self.applied += rows
        me.own_rows += rows
        me.finished.append((self.now, rows))
        self._at_clock[me.clock] -= 1
        me.clock += 1
        self._at_clock[me.clock] += 1
        self._slowest += not self._at_clock[self._slowest]
        if self.discipline.synchronous:  # the update of all workers is the same one
            for other in range(len(self._workers)) if self._slowest >= me.clock else ():
                self._begin(other, self.now)
            return
        self._begin(w, self.now)
        for other in sorted(self._blocked - {w}) if not self._held_up(0) else ():
            self._begin(other, self.now)
