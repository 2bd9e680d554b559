"""Workers that push gradients to parameter servers and pull weights: ``ps_sync``, ``ps_async``, ``ps_bounded``, and
``downpour`` (Dean et al. 2012, "Large Scale Distributed Deep Networks"), which does so every few steps.

The weights are cut into one slice per server; slices differ by at most one element. Only the servers have momentum and
other optimizer state. This file does not determine which samples a worker gets.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from asa.errors import UnavailableError, UsageError
from asa.executor.consistency.channels import HEAD, Exchange, head
from asa.executor.consistency.conduct import Conduct
from asa.executor.consistency.flat_parameters import FlatParameters, slices
from asa.executor.consistency.server import Server, momentum_changes
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.ir.consistency import Discipline

_PUSH, _PULL, _PUT, _KEYS, _STATE, _SET, _COUNTS, _FINISHED, _PAUSE = map(float, range(9))
_MOST_GROUPS = HEAD - 8


class Served(Conduct):
    """Implements the disciplines with servers, also for processes that only serve (an idle ``model``)."""

    def __init__(self, discipline: Discipline, model: ParallelModel, optimizer: Optimizer, votes: Votes) -> None:
        super().__init__(discipline, model, optimizer)
        self._votes = votes
        self._server: Server | None = None
        self._flat: FlatParameters | None = None
        self._first = votes.rank == model.processes[0]
        hooks = {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks}
        if hooks and not model.idle:
            raise UsageError(
                f"the optimizer has {len(hooks)} hooks around its step, which {discipline} makes at servers, over "
                "slices of all weights: leave them out, or train under ddp"
            )
        groups = len(optimizer.param_groups)
        if groups > _MOST_GROUPS:
            raise UsageError(f"{groups} groups of parameters: a server keeps {_MOST_GROUPS} apart at most")
        self._star = votes if isinstance(votes, StarVotes) else None
        hosts = discipline.server_ranks(votes.num_ranks)
        returning = () if self._star is None else self._star.returning
        self._exchange = Exchange(votes.rank, model.processes, hosts, returning=returning)
        description = None
        if not model.idle:
            self._flat = FlatParameters(optimizer)
            dtype = str(self._flat.dtype).removeprefix("torch.")
            description = [self._flat.total, dtype, self._flat.groups]
        if self._star is None or not self._star.late:
            description = votes.tell(description, source=model.processes[0])
            if self._first:
                self._exchange.store_value(description)
        else:
            description = self._exchange.stored_value()
        total, dtype, groups_at = description
        self._slices = slices(total, len(hosts))
        self._push_number = secrets.randbelow(1 << 30)
        self._server_ages = [(0, 0)] * len(hosts)
        if votes.rank in hosts:
            start, stop = self._slices[hosts.index(votes.rank)]
            flat = torch.zeros(stop - start, dtype=getattr(torch, dtype))
            self._server = Server(
                discipline, flat, start, groups_at, optimizer, model.processes, model.plan.global_batch
            )
            if self._star is not None and self._star.late:
                self._restore()
            self._exchange.serve(self._answer, self._server.remove)
        self._exchange.connect()
        self.changes = momentum_changes(discipline, optimizer, len(model.processes))
        self._options = _options(optimizer)
        self._mean_gradient: Tensor | None = None
        self._samples = self._steps = 0
        self._batch = model.plan.global_batch

    def _restore(self) -> None:
        """Continue this server from the snapshot of the process before it.

        Raises:
            UnavailableError: there is none.
        """
        assert self._star is not None
        assert self._server is not None
        snapshot = None if self._star.snapshots is None else self._star.snapshots.read()
        if snapshot is None:
            raise UnavailableError(f"rank {self._star.rank}, a server, was lost before its first snapshot")
        self._server.restore(snapshot)

    def begin(self) -> None:
        """Send the first worker's weights and optimizer state to the servers. A worker that joins late takes the
        servers' weights."""
        if self._star is not None and self._star.late:
            self._start_snapshots()
            return
        if self._first:
            assert self._flat is not None
            weights = self._flat.weights()
            self._ask([(head(_PUT), weights[a:b]) for a, b in self._slices])
            self._send_state()
        self._votes.gather([0.0])
        self._start_snapshots()
        self._mean_gradient, self._samples, self._steps = None, 0, 0

    def _start_snapshots(self) -> None:
        if self._server is not None and self._star is not None and self._star.snapshots is not None:
            self._server.keep_snapshots(self._star.snapshots)

    def enter(self) -> None:
        """Take the servers' weights."""
        if self._flat is not None:
            self.pull()

    def step(self, batch: int) -> None:
        """Push the gradient, wait until this worker may continue, and take the weights of the reply."""
        if self._flat is None:  # this process is a server only
            return
        self._flat.check_trained(self.discipline)
        options = _options(self.optimizer)
        changed = {
            k for before, new in zip(self._options, options, strict=True) for k in new if new[k] != before.get(k)
        }
        if changed:
            raise UsageError(
                f"{', '.join(sorted(changed))} of the optimizer changed during training: servers under "
                f"{self.discipline} follow only learning rates (OneCycleLR: cycle_momentum=False); or train under ddp"
            )
        samples, rates = self.rows(batch), [float(g["lr"]) for g in self.optimizer.param_groups]
        gradient = self._flat.gradients(1 / self.gradient_scale(batch))
        self._batch = batch if self.discipline.lockstep else self.model.plan.global_batch
        if self.discipline.period > 1:
            gradient = self._accumulate(gradient, samples, rates)
            samples = self._samples
            if self._steps < self.discipline.period:
                return
        self._push(gradient, samples, rates)

    def _push(self, gradient: Tensor, samples: int, rates: list[float]) -> None:
        assert self._flat is not None
        self._push_number += 1
        requests: list[tuple[Tensor, Tensor | None]] = [
            (head(_PUSH, samples, self._batch, self._push_number, *server_age, *rates), gradient[a:b])
            for (a, b), server_age in zip(self._slices, self._server_ages, strict=True)
        ]
        self._load_weights(self._ask(requests))
        self._mean_gradient, self._samples, self._steps = None, 0, 0
        self.optimizer.state.clear()  # the servers' own goes on; the first worker had it for a checkpoint

    def _accumulate(self, gradient: Tensor, samples: int, rates: list[float]) -> Tensor:
        """Mean of the gradients since the last push. Until the next push, the worker takes local steps of plain SGD."""
        assert self._flat is not None
        self._steps += 1
        earlier = 0.0 if self._mean_gradient is None else self._samples
        self._samples += samples
        mean = gradient if self._mean_gradient is None else self._mean_gradient
        if self._mean_gradient is not None:
            mean.mul_(earlier / self._samples).add_(gradient, alpha=samples / self._samples)
        self._mean_gradient = mean
        if self._steps < self.discipline.period:
            weights = self._flat.weights()
            groups = zip(self.optimizer.param_groups, rates, self._flat.groups, strict=True)
            for group, rate, (a, b) in groups:
                signed = rate if group.get("maximize") else -rate
                weights[a:b].add_(gradient[a:b], alpha=signed * samples / self.model.plan.global_batch)
            self._flat.put(weights)
        return mean

    def synchronize(self) -> None:
        """Push remaining gradients. Then load the servers' weights on every worker, and their optimizer state on the
        first."""
        if self._mean_gradient is not None:
            self._push(self._mean_gradient, self._samples, [float(g["lr"]) for g in self.optimizer.param_groups])
        if self._flat is not None:
            self._ask([(head(_FINISHED), None)] * len(self._slices))
        self._votes.gather([0.0])
        if self._server is not None:
            live = self._votes.live if isinstance(self._votes, StarVotes) else self.model.processes
            self._server.reset_clocks(live)
        self._votes.gather([0.0])
        if self._flat is not None:
            self.pull()
            if self._first:
                self._fetch_state()
        self.average_buffers()

    def pause(self) -> None:
        """Tell servers not to make others wait for this worker until it pulls again."""
        if self._flat is not None and self._mean_gradient is None and not self.discipline.lockstep:
            self._ask([(head(_PAUSE), None)] * len(self._slices))

    def resume(self) -> None:
        """Pull the current weights, because those from before the pause may be older than the window allows."""
        if self._flat is not None and self._mean_gradient is None and not self.discipline.lockstep:
            self.pull()

    def average_buffers(self) -> None:
        """Average running statistics over all remaining workers (collective)."""
        if not isinstance(self._votes, StarVotes):
            self.model.average_buffers()
            return
        average_over_star(self.model, self._votes)

    def pull(self) -> None:
        """Set the model's weights to those of the servers."""
        assert self._flat is not None
        self._load_weights(self._ask([(head(_PULL), None)] * len(self._slices)))

    def _load_weights(self, replies: list[tuple[Tensor, Tensor | None]]) -> None:
        """Load the weights in the servers' ``replies``, and record how many samples each server has applied."""
        assert self._flat is not None
        for (start, _), (_, weights) in zip(self._slices, replies, strict=True):
            assert weights is not None
            self._flat.put(weights, start)
        self._server_ages = [(int(header[0]), int(header[1])) for header, _ in replies]

    def returned(self, rank: int) -> str:
        """A sentence about ``rank``, which has come back; for a server also how many samples are lost."""
        if rank not in self._exchange.hosts:
            return super().returned(rank)
        _, body = self._ask([(head(_COUNTS), None)] * len(self._slices))[self._exchange.hosts.index(rank)]
        lost_samples = json.loads(_json_text(body)).get("samples_gone", 0)
        return (
            f"rank {rank}, a server, is back with its last snapshot; the gradients of {lost_samples} samples since "
            "then are lost for its part of the weights"
        )

    def held(self) -> list[Tensor]:
        """This server's weights and optimizer state, and the mean gradient since the last push."""
        served = [] if self._server is None else self._server.held()
        return served if self._mean_gradient is None else [*served, self._mean_gradient]

    def answering_bytes(self) -> int:
        """Bytes of other workers' gradients, and of the weights for them."""
        return self._exchange.answering_bytes()

    def figures(self) -> dict[str, object]:
        """Counters of every server since the start: samples applied and rejected, ages of gradients, largest lead of a
        worker. Only on the first worker; empty on others."""
        if not self._first:
            return {}
        replies = self._ask([(head(_COUNTS), None)] * len(self._slices))
        return {"servers": [json.loads(_json_text(body)) for _, body in replies]}

    def close(self) -> None:
        """Close the connections to the servers."""
        self._exchange.close()

    def _ask(self, requests: list[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
        return self._exchange.ask(requests)

    def _answer(self, worker: int, header: Tensor, body: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The reply of this server to a request of ``worker``."""
        server = self._server
        assert server is not None
        operation = float(header[0])
        if operation == _PUSH:
            assert body is not None
            rates = header[6 : 6 + len(server.parts)].tolist()
            batch, serial, applied, restarts = (int(x) for x in header[2:6])
            server.count_lost_samples(applied, restarts)
            weights = server.push(worker, body, int(header[1]), rates, batch=batch, serial=serial)
            return head(*server.age), weights
        if operation == _PULL:
            return head(*server.age), server.pull(worker)
        if operation == _PUT:
            assert body is not None
            server.restart(body)
            return head(), None
        if operation == _FINISHED:
            server.finish(worker)
            return head(), None
        if operation == _PAUSE:
            server.pause(worker)
            return head(), None
        if operation == _COUNTS:
            return head(), _bytes(server.counters())
        if operation == _KEYS:
            return head(), _bytes(server.state_description())
        if operation == _STATE:
            arguments = json.loads(_json_text(body))
            return head(), server.state_row(*arguments)
        assert operation == _SET
        group, key, dtype, scalar, row = _unpack(body)
        server.set_state(group, key, None if dtype is None else row.view(getattr(torch, dtype)), scalar)
        return head(), None

    def _fetch_state(self) -> None:
        """Load the optimizer's state from all servers on the first worker, where checkpoints read it."""
        assert self._flat is not None
        descriptions = [
            json.loads(_json_text(body)) for _, body in self._ask([(head(_KEYS), None)] * len(self._slices))
        ]
        self.optimizer.state.clear()
        for group in range(len(self._flat.groups)):
            for key, scalar in {k: v for each in descriptions for k, v in each[group].items()}.items():
                if scalar is None:
                    replies = self._ask([(head(_STATE), _bytes([group, key]))] * len(self._slices))
                    row = torch.cat([body for _, body in replies if body is not None])
                    trained = self._flat.of_group[group]
                    for p, part in zip(trained, row.split([p.numel() for p in trained]), strict=True):
                        self.optimizer.state[p][key] = part.view_as(p).to(p.device).clone()
                else:
                    for p in self._flat.of_group[group]:
                        self.optimizer.state[p][key] = torch.tensor(scalar, dtype=torch.float32)

    def _send_state(self) -> None:
        """Send each server its slice of the first worker's optimizer state."""
        assert self._flat is not None
        for group, (begin, end) in enumerate(self._flat.groups):
            parameters = self._flat.of_group[group]
            states = [self.optimizer.state.get(p, {}) for p in parameters]
            for key in sorted(set.intersection(*map(set, states)) if states else ()):
                values = [s[key] for s in states]
                if any(not isinstance(v, Tensor) for v in values):
                    continue
                if all(v.shape == p.shape for v, p in zip(values, parameters, strict=True)):
                    row = torch.cat([v.detach().reshape(-1).cpu() for v in values])
                    cuts = [(min(max(a, begin), end) - begin, min(max(b, begin), end) - begin) for a, b in self._slices]
                    self._ask([(head(_SET), _pack(group, key, row[a:b], 0.0)) for a, b in cuts])
                else:
                    self._ask([(head(_SET), _pack(group, key, None, float(values[0])))] * len(self._slices))


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Options of each parameter group without parameters, and without learning rates, which are sent with every
    push."""
    return [
        {k: v for k, v in g.items() if k not in ("params", "lr", "initial_lr", "max_lr", "min_lr")}
        for g in optimizer.param_groups
    ]


@torch.no_grad()
def average_over_star(model: ParallelModel, votes: StarVotes) -> None:
    """Average running statistics over all remaining workers (collective)."""
    statistics = statistics_of(model)
    if any(votes.exchange(statistics.numel())):
        put_statistics(model, votes.mean(statistics))


def _statistics(model: ParallelModel) -> list[Tensor]:
    return [b for c in model.components for b in c.buffers() if b.is_floating_point()]


def statistics_of(model: ParallelModel) -> Tensor:
    """Copy of all running statistics as one vector [n] of float64 on the host."""
    return torch.cat([torch.empty(0).double(), *(b.reshape(-1).cpu().double() for b in _statistics(model))])


@torch.no_grad()
def put_statistics(model: ParallelModel, flat: Tensor) -> None:
    """Write the vector of :func:`statistics_of` back."""
    at = 0
    for b in _statistics(model):
        b.copy_(flat[at : at + b.numel()].view_as(b))
        at += b.numel()


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _json_text(body: Tensor | None) -> str:
    assert body is not None
    return body.numpy().tobytes().decode()


def _pack(group: int, key: str, row: Tensor | None, scalar: float) -> Tensor:
    """A part of an optimizer's state as bytes: length of a JSON description, the description, and the row, if there is
    one."""
    dtype = None if row is None else str(row.dtype).removeprefix("torch.")
    text = json.dumps([group, key, dtype, scalar]).encode()
    front = torch.frombuffer(bytearray(len(text).to_bytes(4, "little") + text), dtype=torch.uint8)
    return front if row is None or not row.numel() else torch.cat([front, row.contiguous().view(torch.uint8)])


def _unpack(body: Tensor | None) -> tuple[int, str, str | None, float, Tensor]:
    """The inverse of :func:`_pack`; the row stays as bytes."""
    assert body is not None
    size = int.from_bytes(body[:4].numpy().tobytes(), "little")
    group, key, dtype, scalar = json.loads(body[4 : 4 + size].numpy().tobytes())
    return group, key, dtype, scalar, body[4 + size :].clone()
