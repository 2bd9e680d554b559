"""Starts ranks on this machine, receives their messages, and ends them all in bounded time, without orphans."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore

from asa.errors import AsaError, PreemptedError, UnavailableError, UsageError, WorkersFailedError
from asa.launch import alive, processes, signals
from asa.launch.blame import Outcome, culprit
from asa.launch.devices import cuda_devices
from asa.launch.environments import environment
from asa.launch.forking import fork_beside_threads, ranks_can_fork, safe_threads
from asa.launch.returns import Return
from asa.launch.signals import NOTHING_TO_SAVE, held_while_starting, leave_terminal
from asa.launch.worker import Failure, Setting, work

T = TypeVar("T")
_log = logging.getLogger("asa")

_GRACE_S = 1.5
"""Seconds to wait, after a failure in a collective, for a report of the rank that caused it."""
_LAST_WORDS_S = 0.1
_FILES, _FEWEST_FILES = (128, 32), (32, 4)
"""Open files of a process that suffice for any plan, and with which ranks only just come up: of its own, per rank."""
_LEAVE_S = 10.0
"""Seconds that a rank may take to exit after its result has arrived."""


class _Terminated(BaseException):
    """Raised when signal ``number`` arrives and is not forwarded to the ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_ranks(
    num_ranks: int,
    function: Callable[..., T],
    *args: Any,
    backend: str = "gloo",
    threads: int | None = None,
    timeout_s: float = 600,
    limit_s: float | None = None,
    watched: bool = False,
    silence_s: float | None = None,
    forward_sigterm: bool = False,
    idle_until_begun: bool = False,
    on_message: Callable[[int, Any], None] | None = None,
    once_started: Callable[[], None] | None = None,
    spare: Callable[[int], bool] | None = None,
    returns: Callable[[int], bool] | None = None,
) -> list[T]:
    """Call ``function(rank, *args)`` on ``num_ranks`` new processes that form one process group.

    Ranks are forked (spawned if this process has used CUDA or, beside CUDA devices, autograd, which do not survive a
    fork: ``function`` and ``args`` must then be picklable). Results must be picklable; tensors in them arrive as
    copies.

    Args:
        backend: ``gloo``, or ``nccl`` (rank r on CUDA device r; CPU tensors still go through gloo).
        threads: per rank; if None, the number of cores divided by the number of ranks.
        timeout_s: seconds a rank waits for the others in any collective, and during start-up.
        limit_s: seconds for everything; None for a training run.
        watched: a rank counts as hung after ``timeout_s`` without a heartbeat (:func:`asa.launch.alive.beat`), or after
            three times its longest silence so far if that is more, even if no other rank waits for it.
        silence_s: if no rank has a heartbeat for this many seconds, they count as hung.
        forward_sigterm: forward SIGTERM to the ranks, which save and return; a second SIGTERM kills them. It is
            delivered after their :func:`~asa.launch.signals.take_sigterm`. If False, the first SIGTERM kills them.
            SIGHUP, unless it is ignored, becomes a SIGTERM to the ranks.
        idle_until_begun: ranks have nothing to save before one of them begins a step, if they are ``watched``. A signal
            that comes earlier kills them at once.
        on_message: called here as ``on_message(rank, message)`` for what ranks :func:`~asa.launch.tell`.
        once_started: called here when all ranks run, to free memory that only they need. If None, ranks are started
            once more if gloo loses a connection during start-up.
        spare: whether the others continue without a given rank if it is lost (None: never); its result is then None.
        returns: whether a given rank is started again if it is lost, as a :class:`~asa.launch.Latecomer`, while the
            others go on (None: never). One that is lost again and again is started ever later, and in the end no more.

    Returns:
        The results, by rank.

    Raises:
        WorkersFailedError: names the rank that caused the failure; the others were killed.
        AsaError: raised by a rank, and raised here unchanged.
        PreemptedError: a signal came while there was nothing to save.
        UnavailableError: there are more nccl ranks than CUDA devices, or the system allows too few open files,
            processes or threads.
        UsageError: a number below 1, or ``threads > 1`` in a process that has itself computed with several threads.
    """
    if num_ranks < 1 or (threads is not None and threads < 1):
        raise UsageError(f"cannot start {num_ranks} ranks of {threads} threads; both must be at least 1")
    if backend == "nccl" and num_ranks > cuda_devices():
        raise UnavailableError(
            f"{num_ranks} nccl ranks need {num_ranks} CUDA devices, this machine has {cuda_devices()}; "
            "plan for fewer, or run on the CPU"
        )
    _allow_files(num_ranks)
    processes.check(num_ranks, training=watched)
    deadline, restarted = None if limit_s is None else time.monotonic() + limit_s, False
    while True:
        limits = (timeout_s, silence_s if silence_s is not None else timeout_s if watched else None)
        crew = _Crew(
            num_ranks, backend, safe_threads(threads, num_ranks), *limits, together=silence_s is not None, spare=spare,
            returns=returns,
        )  # fmt: skip
        room = processes.room()
        with _sigterm(crew, forward_sigterm, idle_until_begun):
            try:
                with held_while_starting(forward_sigterm):  # delivered once ranks have their handlers
                    if forward_sigterm and signals.missed:
                        signals.missed = False
                        signal.raise_signal(signal.SIGTERM)
                    crew.start(function, args)
                if once_started is not None:
                    once_started()
                return crew.listen(on_message, deadline)
            except (OSError, RuntimeError) as error:
                if not processes.is_short(error):
                    raise
                raise UnavailableError(processes.shortage("ranks cannot be started", room, num_ranks)) from error
            except WorkersFailedError as error:
                if processes.explains(error, room, num_ranks):
                    raise UnavailableError(processes.shortage(str(error), room, num_ranks)) from error
                error.stopping = crew.stopping
                if crew.stopping or restarted or once_started is not None or not crew.unmet:
                    raise
                restarted = True
                _log.info("ranks lost each other in coming up, and are started again")
            finally:
                crew.end()


def _allow_files(num_ranks: int) -> None:
    """Raise this process's limit of open files, which its ranks inherit, to what their connections may need. At the
    limit, connections would be tried again and again until the timeout.

    Raises:
        UnavailableError: the system does not allow the least number with which ranks come up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now, allowed = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    enough, least = (own + each * num_ranks for own, each in (_FILES, _FEWEST_FILES))
    if now < min(enough, allowed):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(enough, allowed), hard))
    if allowed < least:
        raise UnavailableError(
            f"{num_ranks} ranks need {least} open files a process, the limit is {allowed}; raise it: ulimit -n 4096"
        )


class _Crew:
    """The processes of one call of :func:`run_ranks`, and their outcomes so far."""

    def __init__(
        self, num_ranks: int, backend: str, threads: int, timeout_s: float, silence_s: float | None, *, together: bool,
        spare: Callable[[int], bool] | None = None, returns: Callable[[int], bool] | None = None,
    ) -> None:  # fmt: skip
        self.spare = spare
        self.returns = {r: Return() for r in range(num_ranks) if returns is not None and returns(r)}
        self.num_ranks, self.backend, self.threads, self.timeout_s = num_ranks, backend, threads, timeout_s
        self.silence_s, self.together = silence_s, together
        self.watch: alive.Watch | None = None
        self.counters: Any = None
        self.steps: Any = None
        self.launch: Callable[[int, bool], None] | None = None
        self.stopping = False
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        self.outcomes: dict[int, Outcome] = {}
        self.spoken = False
        self.store: TCPStore | None = None

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        forking = ranks_can_fork()
        context = multiprocessing.get_context("fork" if forking else "spawn")
        where = environment()
        if self.silence_s is not None:
            self.counters = alive.shared_counters(context, self.num_ranks)
            self.steps = alive.shared_counters(context, self.num_ranks)
            self.steps[:] = [alive.NOT_BEGUN] * self.num_ranks
            self.watch = alive.Watch(self.counters, self.silence_s, together=self.together)
        with socket.socket() as listener:
            # The store uses this bound socket, so no other process can take the port in between. Ranks
            # queue in its backlog until the store's thread runs, which starts after all forks.
            listener.bind((where.host, 0))
            listener.listen(4 * self.num_ranks + 16)
            port = listener.getsockname()[1]

            def launch(rank: int, late: bool = False) -> None:
                parent_end, child_end = context.Pipe()
                setting = Setting(
                    rank=rank,
                    num_ranks=self.num_ranks,
                    backend=self.backend,
                    port=port,
                    where=where,
                    threads=self.threads,
                    timeout_s=self.timeout_s,
                    parent=os.getpid(),
                    counters=self.counters,
                    steps=self.steps,
                    late=late,
                )
                inherited = (*self.connections, parent_end, *(() if late else (listener,))) if forking else ()
                process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                    target=work, args=(setting, child_end, inherited, function, args), name=f"asa-rank-{rank}"
                )
                self.connections[rank : rank + 1] = [parent_end]
                with fork_beside_threads():
                    process.start()
                self.processes[rank : rank + 1] = [process]
                child_end.close()

            self.launch = launch
            for rank in range(self.num_ranks):
                launch(rank)
            self.store = TCPStore(
                where.host,
                port,
                None,
                True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.timeout_s),
                master_listen_fd=listener.detach(),
            )

    def listen(self, on_message: Callable[[int, Any], None] | None, deadline: float | None) -> list[Any]:
        """Wait for all results, and return them by rank.

        Raises:
            WorkersFailedError, AsaError: see :func:`run_ranks`.
        """
        first_failure: float | None = None
        end_at: float | None = None
        while len(self.outcomes) < self.num_ranks:
            now = time.monotonic()
            if first_failure is not None and now > first_failure + _GRACE_S:
                break
            if end_at is None and self.spare is not None and self._needed_are_done():
                end_at = now + _GRACE_S
            if end_at is not None and now > end_at:
                return [self.outcomes[r].result if r in self.outcomes else None for r in range(self.num_ranks)]
            if deadline is not None and now > deadline:
                late = min(set(range(self.num_ranks)) - set(self.outcomes))
                raise WorkersFailedError(f"rank {late} of {self.num_ranks} was not done within the limit", rank=late)
            look = None if self.watch is None else now + self.watch.interval_s
            grace = None if first_failure is None else first_failure + _GRACE_S
            due = self._bring_back(now) if first_failure is None and end_at is None else None
            ends = [t for t in (deadline, grace, look, end_at, due) if t is not None]
            self._receive(on_message, max(0.0, min(ends) - now) + 0.001 if ends else None)
            if first_failure is None:
                self._look()
            failed = [o.failure for r, o in self.outcomes.items() if o.failure is not None and not self._spared(r)]
            if any(not f.collective for f in failed):
                self._receive_last(on_message)
                break
            if failed and first_failure is None:
                first_failure = time.monotonic()
        self._raise_failure()
        return [self.outcomes[rank].result for rank in range(self.num_ranks)]

    def _needed_are_done(self) -> bool:
        """Whether all ranks that are not spare have a result. The spare ones are then not waited for."""
        back = {r for r, record in self.returns.items() if record.starts}
        needed = [r for r in range(self.num_ranks) if r not in back and (self.spare is None or not self.spare(r))]
        return all(r in self.outcomes and self.outcomes[r].failure is None for r in needed)

    def _spared(self, rank: int) -> bool:
        """Whether ``rank`` is lost, and the others continue without it or wait for its return."""
        failure, back = self.outcomes[rank].failure, self.returns.get(rank)
        spare = self.spare is not None and self.spare(rank)
        if failure is None or not (spare or (back is not None and back.possible)):
            return False
        error = failure.error
        return failure.lost or (isinstance(error, WorkersFailedError) and error.lost)

    def _bring_back(self, now: float) -> float | None:
        """Start lost ranks again whose pause is over; returns the end of the next pause, if there is one."""
        ends = []
        for rank in [r for r in self.returns if r in self.outcomes and self._spared(r) and not self.stopping]:
            due = self.returns[rank].due(now)
            if due is not None and due > now:
                ends.append(due)
            elif due is not None and self.launch is not None:
                self.processes[rank].join(_LEAVE_S)
                self.connections[rank].close()
                self.returns[rank].started(now)
                if self.counters is not None:
                    self.counters[rank] = 0
                self.launch(rank, True)
                del self.outcomes[rank]
        return min(ends, default=None)

    def _look(self) -> None:
        """Mark a rank as lost if it has had no heartbeat for too long."""
        running = [r for r in range(self.num_ranks) if r not in self.outcomes]
        hung = None if self.watch is None else self.watch.late(running)
        if hung is not None:
            line = f"hung: it gave no sign of life for {hung[1]:.0f} s"
            if hung[0] in self.returns or (self.spare is not None and self.spare(hung[0])):
                self.processes[hung[0]].kill()  # closes its connections, so that ranks waiting for it get an error
            self.outcomes[hung[0]] = Outcome(failure=Failure(line=line, collective=False, lost=True))

    def _receive_last(self, on_message: Callable[[int, Any], None] | None) -> None:
        """Receive the last messages of the other ranks before they are killed."""
        until = time.monotonic() + _LAST_WORDS_S
        while len(self.outcomes) < self.num_ranks and (remaining_s := until - time.monotonic()) > 0:
            self._receive(on_message, remaining_s)

    def _receive(self, on_message: Callable[[int, Any], None] | None, patience: float | None) -> None:
        """Wait until a rank sends a message or dies, and handle all messages that have arrived."""
        waiting = [r for r in range(self.num_ranks) if r not in self.outcomes]
        sources = {self.connections[r]: r for r in waiting}
        ready = multiprocessing.connection.wait([*sources, *(self.processes[r].sentinel for r in waiting)], patience)
        for rank in waiting:
            if self.connections[rank] not in ready and self.processes[rank].sentinel not in ready:
                continue
            try:
                while rank not in self.outcomes and self.connections[rank].poll():
                    kind, content = pickle.loads(self.connections[rank].recv_bytes())
                    if kind == "message":
                        self.spoken = True
                        if on_message is not None:
                            on_message(rank, content)
                    else:
                        self.outcomes[rank] = Outcome(**{kind: content})
            except (EOFError, OSError, pickle.UnpicklingError):
                # The process is exiting; its exit status says more than its closed pipe.
                self.processes[rank].join(_LEAVE_S)
            if rank not in self.outcomes and not self.processes[rank].is_alive():
                self.outcomes[rank] = Outcome.of_exit(self.processes[rank].exitcode, self.backend)

    def _raise_failure(self) -> None:
        counted = {r: o for r, o in self.outcomes.items() if not self._spared(r)}
        cause = culprit(counted, self.num_ranks, self.timeout_s)
        if cause is None:
            return
        rank, failure = cause
        _log.debug("rank %d failed:\n%s", rank, failure.trace)
        error: AsaError = failure.error or WorkersFailedError(
            f"rank {rank} of {self.num_ranks} {failure.line}",
            rank=rank,
            step=None if self.steps is None else self.steps[rank] if self.steps[rank] != alive.NOT_BEGUN else 0,
            signal=failure.signal,
            lost=failure.lost,
            raised=not failure.lost and failure.error is None,
        )
        if failure.trace:
            error.add_note(f"on rank {rank}:\n{failure.trace}")
        raise error

    @property
    def idle(self) -> bool:
        """Whether it is known that no rank has begun a step."""
        return not self.processes or (self.steps is not None and set(self.steps) == {alive.NOT_BEGUN})

    @property
    def unmet(self) -> bool:
        """Whether ranks have failed only during start-up, and none got further."""
        failures = [o.failure for o in self.outcomes.values()]
        return not self.spoken and bool(failures) and all(f is not None and f.unmet for f in failures)

    def signal(self, number: int) -> None:
        """Send signal ``number`` to every living rank."""
        self.stopping = True
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def end(self) -> None:
        """Let finished ranks exit, kill the others, reap all, and free the port."""
        finished = {r for r, o in self.outcomes.items() if o.failure is None}
        everyone = len(finished) == self.num_ranks
        for rank, connection in enumerate(self.connections):
            if everyone:
                with contextlib.suppress(OSError):
                    connection.send_bytes(b"leave")
            elif rank < len(self.processes):
                self.processes[rank].kill()
        patience = time.monotonic() + _LEAVE_S
        for process in self.processes:
            process.join(max(0.0, patience - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(_LEAVE_S)
        for connection in self.connections:
            connection.close()
        self.store = None


@contextlib.contextmanager
def _sigterm(crew: _Crew, forward: bool, idle_until_begun: bool) -> Iterator[None]:
    """Context that handles SIGTERM, and SIGHUP from a closed terminal, while ranks run. At its end the old handlers are
    restored, and a signal that was not forwarded takes effect.

    Raises:
        PreemptedError: as for :func:`run_ranks`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; ranks still die with this process
        return
    forwarded = hung_up = False

    def answer(number: int, _frame: object) -> None:
        nonlocal forwarded, hung_up
        if number == signal.SIGHUP:
            leave_terminal()
            if hung_up and forward:  # both the shell and the kernel send SIGHUP
                return
            hung_up = True
        elif forwarded:
            raise _Terminated(number)
        if not forward:
            raise _Terminated(number)
        if idle_until_begun and crew.idle:
            raise PreemptedError(NOTHING_TO_SAVE)
        forwarded = forwarded or number == signal.SIGTERM
        signals.asked = True
        crew.signal(signal.SIGTERM)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, answer)}
    if signal.getsignal(signal.SIGHUP) not in (signal.SIG_IGN, None):  # it is not ignored, as under nohup
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, answer)
    try:
        yield
    except _Terminated as end:
        signal.signal(end.number, before[signal.Signals(end.number)])
        signal.raise_signal(end.number)
        raise WorkersFailedError(f"terminated: {crew.num_ranks} ranks were killed") from None
    finally:
        signals.begun = signals.begun or not crew.idle
        for number, handler in before.items():
            signal.signal(number, handler)
