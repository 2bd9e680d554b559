"""Parameters that a program holds, and that are no longer those of the model: it runs on others, in shards or rebuilt.

A list of them would silently be read, clipped, averaged or updated in place of the model's. So every use is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from asa.api.tensors.numbers import run_plain
from asa.errors import UsageError

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
                "a parameter that the program listed before the model was distributed (or began to run whole) is used, "
                "and ranks now train another in its place: list model.parameters() anew"
            )
        return run_plain(func, args, kwargs or {})


def retire(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Refuse every further use of the parameters ``before``, by name, for which the model has others ``now``."""
    live = {id(p) for p in now.values()}
    for name, p in before.items():
        if name in now and id(p) not in live:
            with contextlib.suppress(TypeError):  # shards of torch's have a layout of their own
                p.__class__ = RetiredParameter
