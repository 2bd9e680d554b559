"""A tensor of which each rank of an axis holds a part. A function of it is computed for the whole tensor, or
refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from asa.errors import UsageError
from asa.sharding.split.of_rank import followed, writes
from asa.sharding.split.whole_views import run_whole
from asa.sharding.split.wire import Split, averaged, gathered, whole, whole_with_gradient


@dataclass(frozen=True)
class Call:
    """A call of a torch function, with its name."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def in_place(self) -> bool:
        """Whether the first argument is changed."""
        name = self.name
        return name.endswith("_") and (not name.endswith("__") or (name[:3] == "__i" and name != "__invert__"))


HANDLERS: dict[str, Callable[[Call], Any]] = {}
"""Handlers by the name of the torch function. Functions without a handler are refused."""


def handles(names: Iterable[str], handler: Callable[[Call], Any]) -> None:
    """Register ``handler`` for the functions ``names``."""
    HANDLERS.update(dict.fromkeys(names, handler))


_PLAIN = {
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "layout", "is_floating_point",
    "is_complex", "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_meta", "is_quantized", "is_mkldnn", "is_mps",
    "is_nested", "itemsize", "element_size", "nbytes", "__len__", "get_device", "is_contiguous", "stride", "is_signed",
    "is_conj", "is_neg", "is_inference", "storage_offset",
}  # fmt: skip
"""What is known of the whole tensor without its values."""

_WITH_OUT = {"lerp", "add", "sub", "mul", "div", "addcmul", "addcdiv", "where", "maximum", "minimum", "sign", "clamp"}
"""Functions whose result can be copied to ``out``."""

_WITHOUT_GRADIENTS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__", "argmax", "argmin", "argsort",
    "nonzero", "argwhere", "bincount", "searchsorted", "bucketize", "isin", "histc", "matrix_rank",
}  # fmt: skip
"""Functions whose results have no gradients on one device either."""

_WHY = {
    "grad": "torch.autograd.grad does not know parameters that ranks hold in parts: use loss.backward(), and p.grad",
    "backward": "backward(inputs=...) does not know parameters that ranks hold in parts: set requires_grad instead",
}


class NeedsWholeError(UsageError):
    """A function cannot be computed from parts."""


def refuse(name: str, split: Split) -> NoReturn:
    """Raise the error that ``name`` cannot be computed from parts."""
    raise NeedsWholeError(
        _WHY.get(name)
        or f"{name} needs a whole tensor, and each of {split.axis.size} ranks holds a part of this one: sums, means, "
        "norms and elementwise functions are available; otherwise use model.state_dict(), or plan with "
        "strategies=('ddp',)"
    )


class TensorPart(Tensor):
    """A tensor that looks like the whole tensor; ``held`` is this rank's part of it, with its own memory and gradient.

    Only :data:`HANDLERS` compute values: from ``held`` and, if that is not enough, from other ranks' parts. Such calls
    are collective.
    """

    held: Tensor
    parted: Split
    _gradient: TensorPart | None

    @staticmethod
    def __new__(cls, held: Tensor, split: Split) -> TensorPart:
        shape = list(held.shape)
        shape[split.dim] = split.length
        part: TensorPart = Tensor._make_wrapper_subclass(cls, shape, dtype=held.dtype, device=held.device)  # type: ignore[attr-defined]
        part.held, part.parted, part._gradient = held, split, None
        if isinstance(held, nn.Parameter):
            part._is_param = True  # type: ignore[attr-defined]  # so isinstance says nn.Parameter
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in ("__get__", "__set__"):
            owner = getattr(func.__self__, "fget", func.__self__)
            name = ("" if name == "__get__" else "setting ") + owner.__name__
        if name in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not args:  # torch.sum(input=p), nn.init.normal_(tensor=p)
            first = next((key for key in ("input", "tensor", "self") if key in kwargs), None)
            if first is not None:
                args, kwargs = (kwargs[first],), {k: v for k, v in kwargs.items() if k != first}
        handler = HANDLERS.get(name)
        if "out" in kwargs and kwargs["out"] is None:
            del (kwargs := dict(kwargs))["out"]
        parts = parts_in((*args, *kwargs.values()))
        out = kwargs.get("out")
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in parts)
        may = name not in _WHY and not name.startswith(("setting ", "_foreach"))  # a list may have been changed in part
        if learns and name in _WITHOUT_GRADIENTS:
            with torch.no_grad():
                return cls.__torch_function__(func, types, args, kwargs)
        may = may and not (
            learns and (any(isinstance(p.held, DTensor) for p in parts) or writes(name) or out is not None)
        )
        if handler is None and may:
            return followed(name, args, lambda: _on_whole(func, name, args, kwargs, learns), kwargs)
        if handler is None or ("out" in kwargs and (learns or not isinstance(out, Tensor) or name not in _WITH_OUT)):
            refuse(name, parts[0].parted)
        if out is not None:
            return out.copy_(func(*args, **{k: v for k, v in kwargs.items() if k != "out"}))

        def run() -> Any:
            try:
                return handler(Call(func, name, tuple(args), kwargs))
            except NeedsWholeError:
                if not may:
                    raise
                return _on_whole(func, name, args, kwargs, learns)

        return followed(name, args, run, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # torch.tensor(p)
            return whole(args[0].held, args[0].parted)
        refuse(str(func), parts_in((*args, *(kwargs or {}).values()))[0].parted)

    @property
    def grad(self) -> TensorPart | None:  # type: ignore[override]
        """Gradient of ``held``, as a :class:`TensorPart`; the same object as long as the gradient is the same."""
        gradient, cached = self.held.grad, self._gradient
        if gradient is None:
            self._gradient = None
        elif cached is None or cached.held is not gradient:
            self._gradient = TensorPart(gradient, self.parted)
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.held.grad = None if value is None else matched(value, self)
        self._gradient = None

    @property
    def data(self) -> TensorPart:  # type: ignore[override]
        """A view of the same memory without autograd history."""
        return TensorPart(self.held.data, self.parted)

    @data.setter
    def data(self, value: Tensor) -> None:
        part = matched(value, self)
        if part.shape != self.held.shape:
            raise UsageError(f"data of shape {list(value.shape)} cannot take the place of {list(self.shape)}")
        self.held.data = part

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether ``held`` requires a gradient."""
        return self.held.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.held.requires_grad = value

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether ``held`` is a leaf."""
        return self.held.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Gradient function of ``held``."""
        return self.held.grad_fn

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self.held._version

    def data_ptr(self) -> int:
        """Address of ``held``."""
        return self.held.data_ptr()

    def full_tensor(self) -> TensorPart:
        """This part with its DTensor, if it is one, gathered. A loss with sharded tensors calls this."""
        full = gathered(self.held)
        return self if full is self.held else TensorPart(full, self.parted)

    def register_hook(self, hook: Any) -> NoReturn:  # type: ignore[override]
        """Refuse, because autograd has at best a part of the gradient."""
        raise UsageError(
            "a hook on a parameter that ranks hold in parts would see a part of its gradient; change p.grad after "
            "loss.backward() instead, or plan with strategies=('ddp',)"
        )

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:  # type: ignore[override]
        """Refuse; see :meth:`register_hook`."""
        self.register_hook(hook)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorPart:
        part = TensorPart(self.held.detach().clone().requires_grad_(self.requires_grad), self.parted)
        if getattr(self, "_is_param", False):
            part._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = part
        return part

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse("a copy or pickle", self.parted)

    def __format__(self, form: str) -> str:
        return repr(self) if not form else format(self.tolist(), form)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranks = self.parted.axis
        return (
            f"TensorPart({tuple(self.shape)} over {ranks.size} ranks along dim {self.parted.dim}, dtype={self.dtype}; "
            f"rank {ranks.index} holds {self.held})"
        )


def held_of(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, in the form that the executor uses."""
    return tensor.held if isinstance(tensor, TensorPart) else tensor


def parts_in(values: Sequence[Any]) -> list[TensorPart]:
    """All parts among ``values``, and in lists and tuples among them."""
    parts = [v for v in values if isinstance(v, TensorPart)]
    for v in values:
        if isinstance(v, list | tuple):
            parts += parts_in(v)
    return parts


def matched(value: Any, to: TensorPart) -> Any:
    """This rank's part of ``value``, to be combined with ``to``; dimensions are matched from the last.

    The call is collective if a whole tensor is combined with a differentiated part and is itself differentiated, or is
    a single number. All ranks must then pass the same, and its gradient is the sum over all their parts.

    Raises:
        UsageError: ``value`` is split in another way, or has another length.
    """
    split = to.parted
    right = to.dim() - split.dim  # the sharded dimension, counted from the last
    if isinstance(value, TensorPart):
        if value.dim() - value.parted.dim != right or not value.parted.alike(split):
            raise NeedsWholeError("two tensors that ranks hold in different parts cannot be combined")
        return value.held
    if not isinstance(value, Tensor):
        return value
    if torch.is_grad_enabled() and (value.requires_grad or (to.requires_grad and not value.dim())):
        value = averaged(value, split)
    if value.dim() >= right and value.shape[-right] != 1:
        if value.shape[-right] != split.length:
            raise UsageError(f"a tensor of shape {list(value.shape)} does not fit one of shape {list(to.shape)}")
        value = split.at(value.dim() - right).cut(value)
    target = to.held
    if not value.dim() or not isinstance(target, DTensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, target.device_mesh, [Replicate()] * target.device_mesh.ndim, run_check=False)


def beside_whole(name: str, value: Any) -> Any:
    """``value`` to be combined with a whole tensor that ``name`` returns or writes: parts are gathered (collective).

    Raises:
        UsageError: the part is differentiated.
    """
    if not isinstance(value, TensorPart):
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{name} would write a tensor that ranks hold in parts, with gradients, into one that is not split: use "
            "p.detach(), or torch.no_grad()"
        )
    return whole(value.held, value.parted)


def _put(part: TensorPart, full: Tensor) -> None:
    part.held.copy_(matched(full, part))


def _on_whole(func: Any, name: str, args: Any, options: dict[str, Any], learns: bool) -> Any:
    """``func`` of the whole tensors (collective)."""

    def gather(part: TensorPart) -> Tensor:
        if learns and part.requires_grad:
            return whole_with_gradient(part.held, part.parted)
        return whole(part.held.detach(), part.parted)

    return run_whole(func, name, args, options, TensorPart, gather, _put)


def wrapped(value: Any, like: TensorPart) -> Any:
    """``value``, computed from parts, as a :class:`TensorPart`; ``like`` itself if it is what ``like`` holds."""
    if value is like.held:
        return like
    if not isinstance(value, Tensor):
        return value
    return TensorPart(value, like.parted.at(value.dim() - like.dim() + like.parted.dim))
