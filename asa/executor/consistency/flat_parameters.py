"""A rank's trained parameters as one flat vector, of which servers hold slices and which workers average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asa.errors import UsageError
from asa.sharding.split.local_parts import local


class FlatParameters:
    """The trained parameters of an optimizer, concatenated in the order of its groups; all have one dtype.

    ``groups`` are the start and stop of each group in the vector; ``of_group`` are its parameters.

    Raises:
        UsageError: parameters have several dtypes, or one that is not real, or none is trained.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.of_group: list[list[nn.Parameter]] = [
            [p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups
        ]
        self.parameters = [p for group in self.of_group for p in group]
        if not self.parameters:
            raise UsageError("no parameter of the optimizer is trained (requires_grad)")
        kinds = {p.dtype for p in self.parameters}
        if len(kinds) > 1 or not all(p.is_floating_point() for p in self.parameters):
            named = ", ".join(sorted(str(k).removeprefix("torch.") for k in kinds))
            raise UsageError(
                f"parameters of {named}: workers that do not take the same steps need real parameters of one dtype"
            )
        self.dtype = kinds.pop()
        self.sizes = [local(p).numel() for p in self.parameters]
        self.total = sum(self.sizes)
        self.groups: list[tuple[int, int]] = []
        start = 0
        for group in self.of_group:
            stop = start + sum(local(p).numel() for p in group)
            self.groups.append((start, stop))
            start = stop

    def check_trained(self, discipline: object) -> None:
        """Check that the parameters that are trained now are part of the vector.

        Raises:
            UsageError: one is trained only since the vector was made.
        """
        known = {*self.parameters}
        later = [
            list(p.shape)
            for g in self._optimizer.param_groups
            for p in g["params"]
            if p.requires_grad and p not in known
        ]
        if later:
            raise UsageError(
                f"{len(later)} parameters (the first of shape {later[0]}) are trained since a later step "
                f"(requires_grad_), and {discipline} exchanges those that were trained at the start: save, and resume "
                "with a new job, or train under local_sgd or ddp"
            )

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Copy of the weights [total] on the host."""
        return self.row().cpu()

    @torch.no_grad()
    def row(self, first: int = 0, last: int | None = None) -> Tensor:
        """Copy of the weights of parameters ``first`` to ``last`` (exclusive), on their device."""
        return torch.cat([local(p.detach()).reshape(-1) for p in self.parameters[first:last]])

    @torch.no_grad()
    def put(self, flat: Tensor, start: int = 0) -> None:
        """Write ``flat`` into the weights, beginning at element ``start`` of the vector."""
        at, stop = 0, start + flat.numel()
        for p, size in zip((local(p.detach()) for p in self.parameters), self.sizes, strict=True):
            a, b = max(at, start), min(at + size, stop)
            if a < b and p.is_contiguous():
                p.view(-1)[a - at : b - at].copy_(flat[a - start : b - start])
            elif a < b:  # channels last
                row = p.reshape(-1)
                row[a - at : b - at] = flat[a - start : b - start].to(p.device)
                p.copy_(row.view(p.shape))
            at += size

    @torch.no_grad()
    def gradients(self, scale: float = 1.0) -> Tensor:
        """Copy of the gradients [total] times ``scale``, on the host.

        Raises:
            UsageError: a parameter has no gradient, or a sparse one, which cannot be part of a dense vector.
        """
        sparse = [i for i, p in enumerate(self.parameters) if p.grad is not None and p.grad.is_sparse]
        if sparse:
            shape = list(self.parameters[sparse[0]].shape)
            raise UsageError(
                f"parameter {sparse[0]} of shape {shape} has sparse gradients, but servers update all their weights; "
                "use sparse=False, or train under ddp"
            )
        missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        if missing:
            shape = list(self.parameters[missing[0]].shape)
            raise UsageError(
                f"parameter {missing[0]} of shape {shape} got no gradient in a step, but servers update all their "
                "weights; freeze it before training begins (requires_grad_(False)), or train under ddp"
            )
        flat = torch.cat([p.grad.reshape(-1) for p in self.parameters if p.grad is not None]).cpu()
        return flat if scale == 1 else flat.mul_(scale)


def slices(total: int, parts: int) -> list[tuple[int, int]]:
    """Start and stop of each of ``parts`` nearly equal slices of ``total`` elements.

    >>> slices(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def scales_of(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Largest magnitude over 127 of each consecutive section of ``flat``; 1 if all are 0. ``sizes`` are the lengths of
    the sections."""
    largest = torch.stack(
        [part.abs().amax() if part.numel() else part.new_zeros(()) for part in flat.split(list(sizes))]
    )
    return torch.where(largest > 0, largest / 127, torch.ones_like(largest))


def quantised(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(numbers, scales): ``flat`` as int8, with one scale for each section; ``sizes`` are the lengths of the
    sections."""
    scales = scales_of(flat, sizes)
    wide = scales.repeat_interleave(torch.tensor(list(sizes), device=flat.device))
    return (flat / wide).round_().clamp_(-127, 127).to(torch.int8), scales


def dequantised(numbers: Tensor, scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """Approximate inverse of :func:`quantised`; each value differs by at most half a scale."""
    wide = scales.repeat_interleave(torch.tensor(list(sizes), device=numbers.device))
    return numbers.to(scales.dtype) * wide
