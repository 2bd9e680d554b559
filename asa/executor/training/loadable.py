"""Checks that stored tensors belong to a model. They run before anything is copied, because a copy would broadcast."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import LocalTensor, local_tensors

_SHAPED = frozenset(
    {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta"}
)
"""Entries of stock optimizers' states that have the shape of their parameter."""


def check_weights(model: ParallelModel, state: Mapping[str, Tensor]) -> None:
    """Check that ``state`` has every parameter and buffer of this rank, with its shape and type, and no tensor that is
    in no stage of ``model``.

    Raises:
        ValueError: names the first tensor that is missing, foreign or different.
    """
    local = {item.name: item for item in local_tensors(model)}
    for name, item in local.items():
        if name not in state:
            raise ValueError(f"{name} is missing")
        stored, shape = state[name], _full_shape(item)
        if tuple(stored.shape) != shape:
            raise ValueError(f"{name} is {list(stored.shape)}, the model's {list(shape)}")
        if stored.dtype != item.tensor.dtype:
            raise ValueError(f"{name} is {_name(stored)}, the model's {_name(item.tensor)}")
    _check_names(model, local, state)


def check_optimizer_state(model: ParallelModel, state: Mapping[str, Tensor], count: int | None) -> None:
    """Check that ``state`` (with keys ``name/key``) fits the parameters of ``model`` and has ``count`` entries (None:
    any number).

    Raises:
        ValueError: names the first entry that is foreign or different, or gives the number of entries.
    """
    local = {item.name: item for item in local_tensors(model) if isinstance(item.tensor, nn.Parameter)}
    _check_names(model, local, {full_key.rpartition("/")[0]: value for full_key, value in state.items()})
    for full_key, value in state.items():
        name, _, key = full_key.rpartition("/")
        if name not in local:
            continue
        shape = _full_shape(local[name])
        if key in _SHAPED and (tuple(value.shape) != shape or not (value.is_floating_point() or value.is_complex())):
            raise ValueError(f"{key} of {name} is {_name(value)} {list(value.shape)}, the parameter {list(shape)}")
        if key == "step" and value.numel() != 1:
            raise ValueError(f"{key} of {name} is {list(value.shape)}, not one number")
    if count is not None and len(state) != count:
        raise ValueError(f"the optimizer has {len(state)} tensors, its manifest says {count}")


def _check_names(model: ParallelModel, local: Mapping[str, LocalTensor], names: Mapping[str, Tensor]) -> None:
    foreign = next((name for name in names if name not in local and name not in model.elsewhere), None)
    if foreign is not None:
        raise ValueError(f"{foreign!r} is not a tensor of the model")


def _full_shape(item: LocalTensor) -> tuple[int, ...]:
    """Shape of the full tensor of which ``item`` may be a shard."""
    shape = list(item.tensor.shape)
    if item.shard is not None and item.axis.size > 1:
        shape[item.shard.dim] = item.shard.blocks * item.shard.units * item.shard.unit
    return tuple(shape)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
