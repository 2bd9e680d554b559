"""Small exchanges between ranks beside training: numbers, decisions, and one common error when a rank fails."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import asa.errors
from asa.errors import AsaError, WorkersFailedError, place_of

T = TypeVar("T")
_LOOKS = 4
"""How often within the timeout ranks that are done hear that another one still works."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes: gloo does not send every type of number."""
    return tensor.view(-1).view(torch.uint8)


class Votes:
    """Small collectives over all ranks on the host. They neither wait for the device nor disturb it.

    Text is sent as JSON, never as pickles. Without a process group there is one rank, and every result is its own
    value.
    """

    bounded = True
    """Whether a rank waits for the others no longer than the timeout."""

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self.rank, self.num_ranks = 0, 1
        self._group: Any = None  # torch types it as ProcessGroup or int
        if dist.is_initialized():
            self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.announced: list[Any] | None = None
        """Values announced so far by any rank, stored for ranks that come late; None if they are not stored."""
        self.live: Sequence[int] = range(self.num_ranks)
        """The remaining ranks: all of them, unless ranks may be lost."""
        if self.num_ranks > 1:
            # A group of its own: a vote never queues behind gradients, and works where the default group is nccl.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def meet(self, what: str, *, within_s: float) -> None:
        """Wait until all ranks have reached ``what`` (collective).

        Raises:
            WorkersFailedError: some ranks did not arrive within ``within_s`` seconds or the run's timeout, whichever is
                shorter; names them.
        """
        if self.num_ranks == 1:
            return
        limit = min(within_s, self._timeout_s)
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=limit), wait_all_ranks=self.rank == 0)
        except RuntimeError as error:
            named = re.search(r"Ranks ([\d, ]+) failed", str(error))
            missing = [int(r) for r in re.findall(r"\d+", named.group(1))] if named and self.rank == 0 else [0]
            who = "rank 0, or another that rank 0 names," if self.rank else f"{', '.join(f'rank {r}' for r in missing)}"
            raise WorkersFailedError(
                f"every rank must call {what}, and {who} did not come within {limit:g} s: call it outside of "
                "'if rank == 0', or find out why that rank is late",
                rank=missing[0],
            ) from error

    @property
    def group(self) -> Any:
        """The host process group of all ranks; None for a single rank."""
        return self._group

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The ``values`` of all ranks, by rank; every rank passes the same number of them."""
        if self.num_ranks == 1:
            return [list(values)]
        wire = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(wire) for _ in range(self.num_ranks)]
        dist.all_gather(rows, wire, group=self._group)
        return [f.tolist() for f in rows]

    def everyone(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        return all(vote[0] > 0 for vote in self.gather([1.0 if yes else 0.0]))

    def anyone(self, yes: bool) -> bool:
        """Whether at least one rank says yes."""
        return not self.everyone(not yes)

    def tell(self, value: Any, *, source: int = 0) -> Any:
        """The JSON value of rank ``source``, on every rank; what other ranks pass is ignored."""
        if self.num_ranks == 1:
            return json.loads(json.dumps(value))
        text = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(text)], dtype=torch.int64)
        dist.broadcast(size, source, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == source:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(data, source, group=self._group)
        received = json.loads(data.numpy().tobytes())
        if self.announced is not None:
            self.announced.append(received)
        return received

    def exchange(self, value: Any) -> list[Any]:
        """All ranks' JSON values, by rank."""
        text = json.dumps(value).encode()
        sizes = [int(rank[0]) for rank in self.gather([float(len(text))])]
        if self.num_ranks == 1:
            return [json.loads(text)]
        wire = torch.zeros(max(sizes), dtype=torch.uint8)
        wire[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(wire) for _ in sizes]
        dist.all_gather(rows, wire, group=self._group)
        return [json.loads(data[:size].numpy().tobytes()) for data, size in zip(rows, sizes, strict=True)]

    def started(
        self, out: tuple[torch.Tensor, int] | None, into: tuple[torch.Tensor, int] | None
    ) -> tuple[dist.Work | None, dist.Work | None]:
        """Start to send one host tensor to a rank and to receive one from a rank; return both handles to wait for.
        Messages between two ranks arrive in the order in which they were sent."""
        coming = None if into is None else dist.irecv(into[0], into[1], group=self._group)
        going = None if out is None else dist.isend(out[0], out[1], group=self._group)
        return going, coming

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Copy the values of rank ``source`` into ``tensor`` (a contiguous host tensor, on all ranks of the same shape
        and type)."""
        if self.num_ranks > 1:
            dist.broadcast(as_bytes(tensor), source, group=self._group)

    def agree(self, error: BaseException | None) -> None:
        """Return if no rank has an ``error``. Otherwise raise the error of the first failing rank on all ranks.

        Raises:
            AsaError: with the class that it had there; :class:`WorkersFailedError` for an error of any other kind.
        """
        failed = [rank for rank, vote in enumerate(self.gather([0.0 if error is None else 1.0])) if vote[0] > 0]
        if not failed:
            return
        text = " ".join(str(error).split())
        if error is not None and not isinstance(error, AsaError):
            text += place_of(error)
        name, message = self.tell([type(error).__name__, text], source=failed[0])
        cls = getattr(asa.errors, name, None)
        if isinstance(cls, type) and issubclass(cls, AsaError):
            raise cls(message) from error
        raise WorkersFailedError(f"rank {failed[0]} failed with {name}: {message}", rank=failed[0]) from error

    def once(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` on rank 0 only. Returns its result there and None elsewhere; raises its error on all ranks."""
        result: T | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = action()
            except Exception as caught:
                error = caught
        self.agree(error)
        return result

    def patiently(self, action: Callable[[], T]) -> T:
        """The result of ``action`` on this rank, once those of all ranks are done (collective). They may take longer
        than the timeout, as reading files may; a rank that is gone is noticed all the same.

        Raises:
            AsaError: ``action`` failed on a rank; see :meth:`agree`.
        """
        done, broken = threading.Event(), list[BaseException]()

        def wait() -> None:
            try:
                while not self.everyone(done.wait(self._timeout_s / _LOOKS)):
                    pass
            except BaseException as caught:
                broken.append(caught)

        result: T | None = None
        error: Exception | None = None
        waiting = threading.Thread(target=wait, daemon=True) if self.bounded and self.num_ranks > 1 else None
        if waiting is not None:
            waiting.start()
        try:
            result = action()
        except Exception as caught:
            error = caught
        finally:
            done.set()
            if waiting is not None:
                waiting.join()
        if broken:
            raise broken[0]
        self.agree(error)
        return result  # type: ignore[return-value]
