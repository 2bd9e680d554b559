"""Views of a split tensor in another shape: dimensions permuted or joined, and split unless they are sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from asa.sharding.split.part import Call, TensorPart, handles, refuse
from asa.sharding.split.wire import Split


def reshaped(split: Split, shape: Sequence[int], target: Sequence[int], name: str) -> tuple[Split, list[int]]:
    """(split, shape): the split of a tensor of ``shape`` after reshaping it to ``target``, and the shape of this rank's
    part then.

    The sharded dimension may be joined with its neighbours. Joining it with those after it makes units larger; joining
    it with those before it makes more blocks.
    """
    numel, shard = split.shard.index(split.axis.index).numel(), split.shard
    for dim, length in enumerate(target):
        front = math.prod(target[:dim])
        for a in range(split.dim + 1):
            if math.prod(shape[:a]) != front:
                continue
            for b in range(split.dim + 1, len(shape) + 1):
                if math.prod(shape[a:b]) == length and math.prod(target[dim + 1 :]) == math.prod(shape[b:]):
                    before, after = math.prod(shape[a : split.dim]), math.prod(shape[split.dim + 1 : b])
                    joined = replace(shard, dim=dim, blocks=shard.blocks * before, unit=shard.unit * after)
                    return replace(split, shard=joined), [*target[:dim], before * numel * after, *target[dim + 1 :]]
    return refuse(name, split)


def _sizes(args: Sequence[Any]) -> list[int]:
    return [int(n) for n in (args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args)]


def reshape(call: Call) -> Any:
    """``view``, ``reshape``, ``flatten`` and similar functions."""
    (part, *more), name = call.args, call.name
    if not isinstance(part, TensorPart):
        return part.reshape(more[0].shape)
    shape = list(part.shape)
    more += call.options.values()
    if name in ("view_as", "reshape_as"):
        target = list(more[0].shape)
    elif name == "ravel":
        target = [-1]
    elif name == "flatten":
        start, stop = (n % len(shape) for n in (*more, *(0, -1)[len(more) :]))
        target = [*shape[:start], -1, *shape[stop + 1 :]]
    elif name == "unsqueeze":
        dim = more[0] % (len(shape) + 1)
        target = [*shape[:dim], 1, *shape[dim:]]
    elif name == "squeeze":
        target = [n for n in shape if n != 1] if not more else shape
        if more and shape[more[0]] == 1:
            del target[more[0]]
    elif more and isinstance(more[0], torch.dtype):
        return refuse(name, part.parted)
    else:
        target = _sizes(more)
    if -1 in target:
        target[target.index(-1)] = part.numel() // math.prod(n for n in target if n != -1)
    split, local = reshaped(part.parted, shape, target, name)
    local_view = part.held.view(local) if name.startswith("view") else part.held.reshape(local)
    return TensorPart(local_view, split)


def permute(call: Call) -> Any:
    """Permutations of dimensions: ``t``, ``T``, ``mT``, ``transpose`` and ``permute``."""
    (part, *more), name = call.args, call.name
    more += call.options.values()
    order = list(range(part.dim()))
    if name == "permute":
        order = [n % part.dim() for n in _sizes(more)]
    elif name in ("t", "T"):
        order.reverse()
    else:
        one, other = (-1, -2) if name == "mT" else more
        order[one], order[other] = order[other], order[one]
    return TensorPart(part.held.permute(order), part.parted.at(order.index(part.parted.dim)))


handles(("view", "view_as", "reshape", "reshape_as", "ravel", "flatten", "unsqueeze", "squeeze"), reshape)
handles(("t", "T", "mT", "transpose", "swapaxes", "permute"), permute)
