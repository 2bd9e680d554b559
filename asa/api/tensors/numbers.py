"""Patches for sharded tensors. Numbers from them (``g.norm().item()``) are those of the whole tensor, where torch
silently returns the value of the rank's shard. Random numbers are drawn as for whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, _api, _dispatch, _redistribute, distribute_tensor
from torch.utils import _pytree as pytree

from asa.api.patching import replace_once
from asa.errors import UsageError
from asa.sharding.collectives.reads import reading
from asa.sharding.gradients.sharded import place_local
from asa.sharding.split.of_rank import followed, writes
from asa.sharding.split.whole_views import run_whole
from asa.sharding.split.wire import gathered
from asa.tracing.whole import tensors_of

_DRAWING_ALIKE = ("randn_like", "rand_like", "randint_like")
_MEANS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy")
_VIEWING = {
    "__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind",
    "diagonal", "view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unflatten", "t", "transpose",
    "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "expand_as", "unfold",
    "as_strided",
}  # fmt: skip
"""Functions whose results have the memory of their argument on one device: what is written there changes it."""
_BY_PLACE = {
    "__setitem__", "index_copy_", "index_fill_", "index_add_", "index_put_", "index_reduce_", "scatter_",
    "scatter_add_", "scatter_reduce_", "put_", "masked_scatter_", "fill_diagonal_", "tril_", "triu_", "renorm_",
    "cumsum_", "cumprod_", "conv1d", "conv2d", "conv3d",
}  # fmt: skip
"""Functions that torch computes of shards as if each were a tensor of its own, or of a copy."""
_READING = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__")


BY_BACKWARD = (
    "torch.autograd.grad and torch.func give a rank the gradient of its own samples: ranks add theirs up in "
    "loss.backward(); use that, and p.grad"
)
"""Why gradients by parameters are not computed by a function."""


def refuse_by_shards(args: Any, options: dict[str, Any]) -> None:
    """Check the arguments of ``torch.autograd.grad``.

    Raises:
        UsageError: it is to differentiate by a tensor of which ranks hold shards.
    """
    inputs = args[1] if len(args) > 1 else options.get("inputs")
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(inputs)):
        raise UsageError(BY_BACKWARD)


def patch_sharded_tensors(parameters: Iterable[Tensor]) -> None:
    """Apply these patches if any of ``parameters`` is sharded. Numbers of sharded tensors are then collective."""
    if "item" in DTensor.__dict__ or not any(isinstance(p, DTensor) for p in parameters):
        return
    for name in _READING:
        setattr(DTensor, name, _read_in_full(getattr(Tensor, name)))
    for name in _DRAWING:
        setattr(DTensor, name, _drawn_in_full(getattr(Tensor, name)))
    setattr(DTensor, "__format__", _formatted)  # noqa: B010
    DTensor.__torch_function__ = classmethod(_refused_in_a_line)  # type: ignore[assignment]
    setattr(DTensor, "data", property(_DATA.__get__, _replace_data))  # noqa: B010  # torch declares it a tensor
    torch.utils.swap_tensors = _swapped(torch.utils.swap_tensors)
    for module in (_redistribute, _dispatch, _api):  # that have the function under a name of their own
        replace_once(module, "redistribute_local_tensor", _read_together)


def _read_together(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``redistribute_local_tensor``, through which whatever torch computes of shards of other ranks goes."""

    @wraps(original)
    def redistribute(local_tensor: Tensor, current_spec: Any, target_spec: Any, *args: Any, **options: Any) -> Tensor:
        pairs = zip(current_spec.placements, target_spec.placements, strict=True)
        sends = any(before != after and not before.is_replicate() for before, after in pairs)
        with reading() if sends else nullcontext():
            return original(local_tensor, current_spec, target_spec, *args, **options)

    return redistribute


def _swapped(original: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """``torch.utils.swap_tensors``, by which torch assigns parametrized weights."""

    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        if isinstance(t1, DTensor):
            _replace_data(t1, t2.detach())
        elif isinstance(t2, DTensor):
            raise UsageError(
                "swap_tensors needs two whole tensors, and ranks hold shards of one: use p.data = w.full_tensor()"
            )
        else:
            original(t1, t2)

    return swap_tensors


def _refused_in_a_line(_cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``func`` of sharded tensors.

    Raises:
        UsageError: torch does not know it for them, or it computes gradients by them.
    """
    # Functions that are written in Python count plain tensors among the types.
    if not all(issubclass(t, DTensor) or t is Tensor for t in types):
        return NotImplemented  # theirs to answer
    if func is torch.autograd.grad:
        refuse_by_shards(args, kwargs or {})
    name = getattr(func, "__name__", str(func))
    return followed(name, args, lambda: _run(func, name, args, kwargs), kwargs)


def _run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if func == _SET_GRAD and isinstance(args[1], Tensor):
        args = args[0], _sharded_like(args[1], args[0])
    if name == "set_" and len(args) == 2 and isinstance(args[1], Tensor):
        _replace_data(args[0], args[1])
        return args[0]
    if name in _MEANS and not torch.is_grad_enabled():  # of shards of unlike lengths torch takes the mean of means
        args, kwargs = pytree.tree_map(gathered, (args, kwargs))
    if name in _DRAWING_ALIKE:
        like = args[0]
        with torch.no_grad():
            full = func(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **(kwargs or {}))
            return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    first: Any = args[0] if args else None
    if type(first) in (Tensor, torch.nn.Parameter) and first.numel() == 1 and writes(name):
        # Torch takes a whole tensor of one element for a sharded one, and writes a shard into it.
        args, kwargs = _of_one_kind(args, kwargs or {}) or (args, kwargs)
    options = kwargs or {}
    if not _learns(args, options):
        if name == "__iter__":
            return iter(first.unbind(0))
        if name in _BY_PLACE:
            return run_whole(func, name, args, options, DTensor, _full_copy, _put)
    try:
        result = run_plain(func, args, options)
        if name in _VIEWING and not _learns(args, options) and isinstance(first, DTensor):
            memory = _memory(first)
            if any(_memory(leaf) != memory for leaf in pytree.tree_leaves(result) if isinstance(leaf, DTensor)):
                return run_whole(func, name, args, options, DTensor, _full_copy, _put)
        return result
    except (RuntimeError, AssertionError) as error:
        failed = error
    if "Could not resolve the process group" in str(failed):
        raise UsageError(
            f"{name} has a tensor in shards that was made before the model began to run whole: make it behind the "
            "first call of the model, or say with example_input how the model is called"
        ) from failed
    if "got mixed torch.Tensor and DTensor" in str(failed):
        alike = _of_one_kind(args, options)
        if alike is None:
            raise UsageError(
                f"{name} has a tensor that ranks hold in shards and one that is not, with gradients: use "
                "p.full_tensor(), or plan with strategies=('ddp',)"
            ) from failed
        try:
            return run_plain(func, *alike)
        except (RuntimeError, AssertionError) as error:
            failed = error
    if "harding propagation failed" not in str(failed) and not _runs_on_whole(func, args, options):
        raise failed
    if _learns(args, options):
        raise UsageError(
            f"{name} needs a whole tensor, and ranks hold shards of this one: use p.full_tensor() or "
            "model.state_dict(), or plan with strategies=('ddp',)"
        ) from failed
    return run_whole(func, name, args, options, DTensor, _full_copy, _put)


def _learns(args: Any, options: dict[str, Any]) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of((args, options)))


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def run_plain(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """The result of ``func``, by which no subclass of tensors is asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **options)


def _full_copy(tensor: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().full_tensor().clone()  # type: ignore[no-any-return]


def _put(tensor: Any, full: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        if any(p.is_partial() for p in tensor.placements):  # a norm, say: torch would write into a copy
            whole = DTensor.from_local(full, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
            tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec
            return
        tensor.detach().copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None))


def _runs_on_whole(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` runs on tensors of the same shapes that no rank holds in shards."""

    def whole(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf

    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            func(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))
    except Exception:  # it fails on one device, too
        return False
    return True


def _of_one_kind(args: Any, kwargs: dict[str, Any]) -> Any:
    """Arguments of a function in which whole tensors, the same on all ranks, meet sharded ones: sharded alike if the
    first is sharded, otherwise whole. None if gradients go through them."""
    leaves = tensors_of((args, kwargs))
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        return None
    sharded = {leaf.shape: leaf for leaf in leaves if isinstance(leaf, DTensor)}
    cuts = isinstance(leaves[0], DTensor)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) is cuts:
            return leaf
        if isinstance(leaf, DTensor):
            return gathered(leaf)
        like = sharded.get(leaf.shape)
        placements: Any = [Replicate()] * leaves[0].device_mesh.ndim  # type: ignore[attr-defined]
        if like is not None and not any(p.is_partial() for p in like.placements):  # a whole tensor is no sum over ranks
            placements = like.placements
        return distribute_tensor(leaf, leaves[0].device_mesh, placements, src_data_rank=None)  # type: ignore[attr-defined]

    return pytree.tree_map(one, (args, kwargs))


_DATA: Any = Tensor.data
_SET_GRAD: Any = Tensor.grad.__set__  # type: ignore[union-attr]


def _sharded_like(value: Tensor, like: DTensor) -> DTensor:
    """``value``, the same on all ranks if it is whole, in shards as those of ``like``."""
    if isinstance(value, DTensor):  # computed of vectors, it may be whole or cut elsewhere
        with torch.no_grad():
            same = value.placements == like.placements
            return value if same else value.redistribute(like.device_mesh, like.placements)
    value = value.detach().to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _replace_data(tensor: DTensor, value: Tensor) -> None:
    """``p.data = value`` and ``p.set_(value)``: torch leaves what ranks gather as it was, without a word."""
    value = _sharded_like(value, tensor)
    if value.shape != tensor.shape:
        raise UsageError(f"data of shape {list(value.shape)} cannot take the place of {list(tensor.shape)}")
    place_local(tensor, value.to_local().to(tensor.dtype))


_DRAWING = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_", "geometric_")


def _drawn_in_full(original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(tensor: DTensor, *args: Any, **options: Any) -> DTensor:
        with torch.no_grad():  # every rank draws the whole tensor and keeps its part, so equal seeds give equal tensors
            full = original(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **options)
            part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(part)
        return tensor

    return draw


def _formatted(tensor: DTensor, spec: str) -> str:
    """``f"{p.norm():.3f}"``, which torch refuses."""
    return format(gathered(tensor).item(), spec) if spec and not tensor.dim() else object.__format__(tensor, spec)


def _read_in_full(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: DTensor, *args: Any, **options: Any) -> Any:
        return original(tensor.full_tensor(), *args, **options)

    return read
