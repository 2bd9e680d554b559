"""Functions that need a whole tensor, of tensors that ranks hold in parts or shards: they run on what is gathered, and
what they write goes back. Every such call is collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from asa.errors import UsageError
from asa.sharding.split.of_rank import writes

_KNOWN = {
    "shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "layout", "itemsize", "__len__", "stride",
    "is_floating_point", "is_complex", "is_contiguous", "requires_grad", "is_leaf", "grad_fn", "grad",
}  # fmt: skip
"""What is asked for without values."""


class Gathered:
    """The whole tensor ``full`` of ``source``, of which this rank has a part."""

    def __init__(
        self, source: Tensor, gather: Callable[[Tensor], Tensor], put: Callable[[Tensor, Tensor], None]
    ) -> None:
        self.source, self._gather, self._put = source, gather, put
        self.full = gather(source)

    def read(self) -> None:
        """Bring ``full`` up to date: a view of it may be older than an update (collective)."""
        with torch.no_grad():
            self.full.copy_(self._gather(self.source))

    def written(self) -> None:
        """Put ``full`` into the parts."""
        with torch.no_grad():
            self._put(self.source, self.full)

    def view(self, leaf: Any) -> Any:
        """``leaf``, as a view whose changes reach the parts if it has the memory of ``full``. One with gradients cannot
        be changed."""
        if self.full.requires_grad or type(leaf) is not Tensor or leaf.is_meta or leaf.layout is not torch.strided:
            return leaf
        if leaf.untyped_storage().data_ptr() != self.full.untyped_storage().data_ptr() or not leaf.numel():
            return leaf
        view = leaf.as_subclass(WholeView)
        view.gathered = self
        return view


class WholeView(Tensor):
    """A view of a gathered tensor. It is gathered again in each use, and what is written into it reaches the parts."""

    gathered: Gathered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            owner = getattr(func.__self__, "fget", func.__self__).__name__
            if name == "__set__":
                raise UsageError(
                    f"setting {owner} of a view of a tensor that ranks hold in parts: write into it (v[...] = x)"
                )
            name = owner
        views = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, WholeView)]
        alive = {id(v.gathered): v.gathered for v in views}
        if name not in _KNOWN:
            for each in alive.values():
                each.read()
        args, options = pytree.tree_map(plain, (args, kwargs))
        return run_on(func, name, args, options, list(alive.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self.gathered.read()
        memo[id(self)] = copied = plain(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.gathered.read()
        return plain(self).clone().__reduce_ex__(protocol)


def plain(leaf: Any) -> Any:
    """``leaf`` without its following, if it is a view."""
    if not isinstance(leaf, WholeView):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.as_subclass(Tensor)


def run_on(func: Any, name: str, args: Any, options: dict[str, Any], gathered: list[Gathered]) -> Any:
    """``func`` of arguments among which those of ``gathered`` are whole; what it writes goes back."""
    result = func(*args, **options)
    out = options.get("out")
    changed = ([args[0]] if args and writes(name) else []) + ([] if out is None else [out])
    memory = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(changed) if type(t) is Tensor}
    for each in gathered:
        if each.full.untyped_storage().data_ptr() in memory:
            each.written()
    if name == "numpy" and any(each.full.data_ptr() for each in gathered):
        result.flags.writeable = False  # it would be a copy in which nobody sees changes

    def view(leaf: Any) -> Any:
        for each in gathered:
            leaf = each.view(leaf)
        return leaf

    return pytree.tree_map(view, result)


def run_whole(
    func: Any, name: str, args: Any, options: dict[str, Any], kind: type[Tensor],
    gather: Callable[[Any], Tensor], put: Callable[[Any, Tensor], None],
) -> Any:  # fmt: skip
    """``func`` of arguments in which tensors of ``kind``, without gradients, are gathered. What it writes is put back,
    and where it returns one of them, that one is returned."""
    found: dict[int, Gathered] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, kind):
            return plain(leaf)
        if id(leaf) not in found:
            found[id(leaf)] = Gathered(leaf, gather, put)
        return found[id(leaf)].full

    leaves = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, WholeView)]
    views = {id(v.gathered): v.gathered for v in leaves}
    for each in views.values():
        each.read()
    whole_args, whole_options = pytree.tree_map(one, (args, options))
    result = run_on(func, name, whole_args, whole_options, [*found.values(), *views.values()])
    if args and writes(name) and isinstance(args[0], kind) and isinstance(result, Tensor):
        return args[0]
    return result
