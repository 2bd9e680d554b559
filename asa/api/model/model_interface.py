"""The interface of a distributed model as a torch module: parameters, ``state_dict`` and attributes of the original."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from asa.api.losses.terms import LearningModel
from asa.api.model import attributes
from asa.api.model.own_methods import training_method
from asa.api.tensors.clipping import clip
from asa.api.tensors.names import StateNames
from asa.api.tensors.parameter_tools import drawn_as_whole, held_parts
from asa.api.tensors.views import TensorViews
from asa.errors import UsageError
from asa.executor.model.parameter_hooks import replaced
from asa.executor.model.state import load_full_state
from asa.sharding.layers.dropout import put_back
from asa.tracing.preserve import with_parameters

MEETING_S = 30.0
"""Seconds to wait for all ranks in calls that a program easily makes on one rank only."""
_MOST_BYTES = 1 << 28
"""Largest number of bytes of a ``state_dict`` that is held until the next call, to see whether it was changed."""
_ELEMENTS = 4096
"""Number of elements of a part by which changes are noticed."""


def _sum_of_some(tensor: Tensor) -> float:
    return float(tensor.detach().reshape(-1)[:_ELEMENTS].double().sum())


def _inside_first(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths of ``module`` and of those in it, in the order in which torch applies a function to them."""
    for name, child in module.named_children():
        yield from _inside_first(child, f"{path}.{name}" if path else name)
    yield path


def _forget_shards(model: nn.Module) -> None:
    """Remove the hooks by which torch gathers and shards parameters, of which a plain copy has none. They cannot be
    pickled."""
    for module in model.modules():
        for hooks in (value for name, value in vars(module).items() if name.endswith("_hooks") and value):
            for key in [k for k, h in hooks.items() if _of_shards(getattr(h, "hook", h))]:
                del hooks[key]


def _of_shards(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


class ModelInterface(LearningModel):
    """What a program reads, sets and calls on a distributed model apart from ``forward``, as on the original one.

    Attributes that it does not have are the model's own (:mod:`asa.api.model.attributes`).
    """

    parts: nn.ModuleList
    """This rank's components, or the original model if nothing is distributed."""
    names: StateNames | None
    views: TensorViews | None

    def train(self, mode: Any = True, *args: Any, **options: Any) -> Any:
        """Set the mode, as for any module. With other arguments, it is the model's own method of this name."""
        if args or options or not isinstance(mode, bool | int):
            if self.parallel is None:
                return self.parts[0].train(mode, *args, **options)
            return training_method(self, self.origin, "train")(mode, *args, **options)
        mode = bool(mode)
        self.__dict__["training"] = mode
        if self.parallel is None:
            self.parts[0].train(mode)
        else:
            self.parallel.train(mode, all_alike=True)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, under the names of the model and in its order; for split ones, views of
        the whole."""
        return self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers, in the form in which :meth:`named_parameters` yields parameters."""
        return self._named("named_buffers", prefix, recurse, remove_duplicate)

    def _named(self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        yielded: set[int] = set()
        for i, part in enumerate(self.parts):
            for name, tensor in getattr(part, kind)("", recurse, remove_duplicate):
                if remove_duplicate and id(tensor) in yielded:
                    continue
                yielded.add(id(tensor))
                views = self.views
                found.append((name, tensor if views is None else views.of(tensor, views.splits[i].get(name))))
        if self.names is not None:  # components hold them in the order in which forward uses them
            order = self.names.order
            found.sort(key=lambda item: order.get(item[0], len(order)))
        yield from ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in found)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the model's own names, on the CPU, for loading into the plain model. Collective if the
        plan splits or shards anything, so call it on every rank. A module around this one (``torch.compile(model)``)
        passes ``destination`` and ``prefix``."""
        parallel = self.parallel
        if parallel is None:
            return self.parts[0].state_dict(*args, **options)
        assert self.names is not None
        self.check_states()
        if any(map(replaced, parallel.plan.components)):
            parallel.meet("model.state_dict() of a plan that splits the model", within_s=MEETING_S)
        state = self.names.full(parallel)
        tensors = {n: t for n, t in state.items() if isinstance(t, Tensor)}
        if sum(t.nbytes for t in tensors.values()) <= _MOST_BYTES:
            self.__dict__["states"] = [(n, t, t._version) for n, t in tensors.items()]
        return attributes.entered(state, *args, **options)

    def check_states(self) -> None:
        """Warn if a tensor of the last :meth:`state_dict` was changed in place, and not loaded."""
        states: list[tuple[str, Tensor, int]] = self.__dict__.get("states", [])
        if states:
            self.__dict__["states"] = []
        name = next((name for name, tensor, version in states if tensor._version != version), None)
        if name is not None:
            warnings.warn(
                f"{name} of model.state_dict() was changed in place, which on one device changes the model: here these "
                "tensors are copies; use model.load_state_dict(state), or change model.parameters()",
                stacklevel=4,
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors from :meth:`state_dict` or the plain model; every rank must pass all of them.

        Returns what one device returns: names that are missing, and names that are too many.

        Raises:
            UsageError: there are such names, or shapes are others.
        """
        parallel = self.parallel
        if parallel is None:
            return self.parts[0].load_state_dict(state_dict, strict=strict, assign=assign)
        assert self.names is not None
        self.__dict__["states"] = []
        if attributes.loads_by_itself(self.origin):  # old names, missing ones: as the program reads them
            copied = copy.deepcopy(self)
            try:
                differing = copied.load_state_dict(state_dict, strict=strict)
            except RuntimeError as error:
                raise UsageError(" ".join(str(error).split())) from None
            parallel.reduction.release()
            load_full_state(parallel, self.names.compared(parallel, copied.state_dict(), strict=False).state)
            return differing
        try:
            found = self.names.compared(parallel, state_dict, strict=strict)
        except RuntimeError as error:
            raise UsageError(" ".join(str(error).split())) from None
        parallel.reduction.release()  # what a forward has gathered would be forgotten
        load_full_state(parallel, found.state, partly=not strict)
        return found.differing

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load the part of ``state_dict`` that begins with ``prefix``, the state of a module around this one."""
        own = {n.removeprefix(prefix): value for n, value in state_dict.items() if n.startswith(prefix)}
        self.__dict__["around"] = prefix, []
        try:
            found = self.load_state_dict(own, strict=False)
        except (RuntimeError, UsageError) as error:
            error_msgs.append(str(error))
            return
        self.__dict__["around"] = prefix, [prefix + n for n in found.missing_keys]
        unexpected_keys += [prefix + n for n in found.unexpected_keys]

    def loaded_around(self, differing: Any) -> None:
        """Put the names that are missing in the place of those of ``parts``, which torch looks for in a state that is
        loaded into a module around this one."""
        prefix, missing = self.__dict__.pop("around", ("", []))
        others = [n for n in differing.missing_keys if not n.startswith(f"{prefix}parts.")]
        differing.missing_keys[:] = others + missing

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` for every module, as for any module (``model.apply(initialise)``). ``torch.nn.init`` draws what
        one device draws; other changes of a part that a module has are warned of."""
        if self.parallel is None or self.views is None:
            self.parts[0].apply(fn)
            return self

        def watched(module: nn.Module) -> None:
            before = [(name, p, p.detach().clone()) for name, p in held_parts(module)]
            fn(module)
            changed = [name for name, p, was in before if not drawn_as_whole(p) and not torch.equal(p.detach(), was)]
            if changed:
                warnings.warn(
                    f"a function that model.apply calls changed {type(module).__name__}.{changed[0]}, of which this "
                    "rank has a part: one device changes the whole; use torch.nn.init, or model.named_parameters()",
                    stacklevel=4,
                )

        found: dict[str, list[nn.Module]] = {}
        for path, module in self.named_modules():
            found.setdefault(path, []).extend([] if module is self else [module])
        for path in _inside_first(self.origin):
            for module in found.get(path, []):
                watched(module)
        return self

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, over all ranks and shards (collective)."""
        parallel = self.parallel
        if parallel is None:
            return nn.utils.clip_grad_norm_(self.parts[0].parameters(), max_norm)
        return clip(parallel, max_norm)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain copy of the original model with the weights, buffers and modes of now, which every rank calls on its
        own. Collective if the plan splits or shards anything."""
        if self.parallel is None:
            memo[id(self)] = copied = copy.deepcopy(self.parts[0], memo)
            return copied
        device = self.rank_context.device
        state = self.state_dict()
        whole, _ = with_parameters(
            self.origin, [self.origin], lambda p: torch.empty(p.shape, dtype=p.dtype, device=device)
        )
        put_back(whole)
        _forget_shards(whole)
        whole.load_state_dict(state)
        learns = {n: p.requires_grad for n, p in self.named_parameters(remove_duplicate=False)}
        for name, p in whole.named_parameters(remove_duplicate=False):
            p.requires_grad_(learns.get(name, p.requires_grad))
        whole.train(self.training)
        kept, modules = dict(whole.named_buffers()), dict(whole.named_modules())
        for part in self.parts:
            for name, buffer in part.named_buffers():
                if name in kept and kept[name].shape == buffer.shape:  # also those that no state has
                    kept[name].copy_(buffer)
            for name, module in part.named_modules():
                if name in modules:
                    modules[name].training = module.training
        memo[id(self)] = whole
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        """How to make the plain model with the weights of now from a file (``torch.save(model, f)``). Collective."""
        if self.parallel is None:
            return super().__reduce_ex__(protocol)
        return attributes.itself, (copy.deepcopy(self),)

    def __copy__(self) -> Self:
        if self.parallel is None:
            made = type(self).__new__(type(self))
            made.__dict__.update(self.__dict__)
            return made
        raise UsageError(
            "copy.copy(model) shares parameters with a model that ranks share, whose gradients they would not add up: "
            "use copy.deepcopy(model), which is a plain model"
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script(model)`` compiles: a plain copy with the weights of now."""
        return self.parts[0] if self.parallel is None else copy.deepcopy(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "origin" not in self.__dict__:
                raise
        return attributes.get_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in self.__dict__ or name in self.__dict__.get("_modules", ()) or hasattr(type(self), name)
        if is_own or "origin" not in self.__dict__ or not attributes.set_attribute(self, name, value):
            super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        """A module of a model that is a sequence, or whatever the model has at ``key``."""
        return attributes.part_of(self, self.origin[key])  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.parallel is not None:
            raise UsageError(f"model[{key!r}] cannot be replaced behind asa.parallelize: do it before the call")
        self.parts[0][key] = value  # type: ignore[operator]

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's own children, whose calls are collective."""
        if self.parallel is None:
            yield from self.parts[0].named_children()
            return
        yield from ((name, attributes.part_of(self, child)) for name, child in self.origin.named_children())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of this rank, under the names of the model and in its order. A loop that changes parts of
        parameters through them is warned. One that was traced through has its class and attributes."""
        if self.parallel is None:
            yield from self.parts[0].named_modules(memo, prefix, remove_duplicate)
            return
        traced: dict[str, tuple[nn.Module, bool, dict[str, Any]]] = self.__dict__.get("traced", {})
        found = [
            (name.removeprefix(prefix).partition("parts.")[2].partition(".")[2], module)
            for name, module in super().named_modules(memo, prefix, remove_duplicate)
            if module is not self.parts
        ]
        emptied = {path for path, module in found if type(module) is nn.Module and path in traced}
        found += [(path, m) for path, (m, gone, plain) in traced.items() if gone and plain and path not in emptied]
        order = {path: number for number, (path, _) in enumerate(self.origin.named_modules(remove_duplicate=False))}
        found.sort(key=lambda item: order.get(item[0], len(order)))
        yielded: set[str] = set()
        for path, module in found:
            name = f"{prefix}.{path}" if prefix and path else prefix + path
            if path in traced and module is traced[path][0]:
                yield name, module
                continue
            if path in emptied:
                if path not in yielded:
                    yield name, attributes.part_of(self, traced[path][0])
                yielded.add(path)
                continue
            parts = held_parts(module)
            tensors = [*parts, *((f"{key}.grad", p.grad) for key, p in parts if p.grad is not None)]
            before = [_sum_of_some(t) for _, t in tensors]
            if parts:
                self.__dict__.setdefault("lent_parts", True)
            yield name, module
            changed = [
                key
                for (key, t), was in zip(tensors, before, strict=True)
                if not drawn_as_whole(t) and _sum_of_some(t) != was
            ]
            if changed:
                warnings.warn(
                    f"{type(module).__name__}.{changed[0]} was changed through model.modules(), and this rank has a "
                    "part of it: random numbers, and what goes over rows or columns, are other than on one device; use "
                    "torch.nn.init, or model.named_parameters()",
                    stacklevel=2,
                )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        held = set() if self.parallel is None else {(p.dtype, p.device) for p in self.parts.parameters()}
        for dtype, device in held:
            changed = fn(torch.empty(0, dtype=dtype, device=device))
            if changed.dtype != dtype or changed.device != device:
                raise UsageError(
                    f"parameters cannot change from {dtype} on {device} to {changed.dtype} on {changed.device} behind "
                    "asa.parallelize: do it before the call; model.state_dict() has tensors on the CPU"
                )
        for part in self.parts:
            part._apply(fn, recurse)
        return self

    def __len__(self) -> int:
        return len(self.origin)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """What ``DistributedDataParallel`` asks for first, and other tools that read all attributes.

        Raises:
            UsageError: it is that, and ranks share this model already.
        """
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if self.parallel is None or asking != "torch.nn.parallel.distributed":
            return []
        raise UsageError(
            "the model of asa.parallelize is put into DistributedDataParallel (by accelerate's prepare(model), or a "
            "trainer?), which would add up gradients once more: leave that out, or train in a loop of your own"
        )

    @property
    def module(self) -> Self:
        """This model itself, for programs that were written for ``DistributedDataParallel``."""
        return self

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context that does nothing: gradients may accumulate over several backwards, and are reduced after each."""
        return contextlib.nullcontext()
