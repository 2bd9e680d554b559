"""Parameters that a program holds, and that are no longer those of the model: it runs on others, in shards or rebuilt.

A list of them would silently be read, clipped, averaged or updated in place of the model's. So every use is refused.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from asa.api.tensors.numbers import run_plain
from asa.errors import UsageError
from asa.executor.model.parameter_memory import span
from asa.sharding.split.local_parts import local
from asa.sharding.split.of_rank import writes

_KNOWN = {
    "shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "layout", "requires_grad", "itemsize",
    "element_size", "nbytes", "name", "__len__", "__repr__",
}  # fmt: skip
"""What may still be asked for, beside what begins with ``is_``."""


class RetiredParameter(nn.Parameter):
    """A parameter that is no longer one of the model."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(func.__self__, "fget", func.__self__).__name__
        if name not in _KNOWN and not name.startswith("is_"):
            raise UsageError(
                "a parameter (or a view of one) that the program listed before the model was distributed (or began to "
                "run whole) is used, and ranks now train another in its place: list model.parameters() anew"
            )
        return run_plain(func, args, kwargs or {})


class RetiredMemory(Tensor):
    """A tensor in the memory of a parameter that is no longer one of the model."""

    __torch_function__ = RetiredParameter.__torch_function__  # type: ignore[assignment]


class ReplacedParameter(RetiredParameter):
    """A parameter of a model that was handed to ``asa.Job``, where this rank trains another in its place. Weights may
    be copied into it, which makes it a plain parameter again."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "copy_" and isinstance(args[0], ReplacedParameter):
            replaced: Any = args[0]
            replaced.__class__ = nn.Parameter
            return run_plain(func, args, kwargs or {})
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except UsageError as error:
            raise UsageError(
                "a parameter of the model that was handed to asa.Job is used, and ranks train others in its place: "
                "change parameters before the job is made; model.load_state_dict(job.state_dict(), assign=True) gives "
                "the model its weights"
            ) from error


class ParameterElsewhere(ReplacedParameter):
    """A parameter of such a model that another rank trains. To change it is allowed here, and has no effect."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        of_data = name == "__get__" and getattr(func.__self__, "__name__", "") == "data"
        if of_data or name == "__set__" or (writes(name) and name != "copy_") or name == "requires_grad_":
            return run_plain(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def retire_in_job(model: nn.Module, components: Iterable[nn.Module]) -> None:
    """Refuse every further use of the parameters of ``model`` that are not among those of ``components``, which this
    rank trains."""
    here = {name: p for component in components for name, p in component.named_parameters(remove_duplicate=False)}
    live = set(map(id, here.values()))
    gone: dict[nn.Parameter, bool] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in live and type(p) is nn.Parameter:
            gone[p] = gone.get(p, False) or name in here  # a shared one is here under one of its names
    for p, is_replaced in gone.items():
        p.__class__ = ReplacedParameter if is_replaced else ParameterElsewhere


def retire(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Refuse every further use of the parameters ``before``, by name, for which the model has others ``now``."""
    live = {id(p) for p in now.values()}
    gone = [p for name, p in before.items() if name in now and id(p) not in live]
    used = [span(p) for p in map(local, now.values()) if _memory(p) and p.numel()]
    left = [(_memory(p), span(p)) for p in gone if type(p) is nn.Parameter and _memory(p) and p.numel()]
    # A program may keep parameters in one memory, of which some are still the model's.
    left = [(memory, place) for memory, place in left if not any(_overlap(place, other) for other in used)]
    memories = {memory for memory, _ in left}
    for t in gc.get_objects() if left else ():
        near = type(t) is Tensor and _memory(t) in memories and t.numel()
        if near and any(_overlap(span(t), place) for _, place in left):
            t.__class__ = RetiredMemory
    for p in gone:
        with contextlib.suppress(TypeError):  # shards of torch's have a layout of their own
            p.__class__ = RetiredParameter


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _memory(t: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, on the meta device, in parts
        return 0
