"""Builds a model in one thread while another imports the training code, so that the slowest parts of a start
overlap."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from threading import Thread
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import nn

    from asa.zoo.inputs import Shape


_COMPILER, _QUESTION = "torch._dynamo.utils", "is_compile_supported"


@contextlib.contextmanager
def compiler_later() -> Iterator[None]:
    """Context in which torchvision is imported without torch's compiler, whose import takes as long as the rest.

    One of torchvision's operators asks the compiler one question when it is called, and imports it early for that. A
    replacement module imports the real one at the first call. Other uses of the compiler meanwhile import it, too.
    """
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = ModuleType(_COMPILER)

    def leave() -> None:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]

    def real(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        leave()
        return getattr(importlib.import_module(_COMPILER), name)

    setattr(stand_in, _QUESTION, lambda *args: real(_QUESTION)(*args))
    setattr(stand_in, "__getattr__", real)  # noqa: B010 - a module's, which no type knows
    sys.modules[_COMPILER] = stand_in
    try:
        yield
    finally:
        leave()


class ModelPreload:
    """Builds the model that ``spec`` names (:func:`asa.zoo.models.build`) in a thread while the body of ``with`` runs.

    ::

        with ModelPreload("vgg16", num_classes=100, input_shape=(3, 32, 32), seed=0) as made:
            from asa.executor.running.run import train      # takes seconds, most of them in torch's own modules
        model = made.take() or build(...)

    The model must have been planned for such inputs: it is not tried on them, which would wait for the imports.

    Until the end of the body the random generators belong to the thread; the body must not use them. The thread
    computes with one OpenMP thread, so that ranks with several can be forked afterwards, and imports nothing: two
    threads in torch's circular imports could see incomplete modules. Imported objects stay, so garbage collection is
    off meanwhile. External models run other people's code, so they are built by the ranks.
    """

    def __init__(self, spec: str, *, num_classes: int, input_shape: Shape, seed: int) -> None:
        self._spec, self._num_classes, self._input_shape, self._seed = spec, num_classes, input_shape, seed
        self._model: nn.Module | None = None
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        gc.disable()
        import torch

        with compiler_later():
            import torchvision  # noqa: F401 - for the thread

            import asa.zoo.models  # noqa: F401 - likewise

        self._before = torch.get_num_threads()
        torch.set_num_threads(1)
        if ":" not in self._spec:
            self._thread = Thread(target=self._make, name="asa-head-start")
            self._thread.start()
        import torch._dynamo

        return self

    def _make(self) -> None:
        from asa.zoo.models import build

        with contextlib.suppress(Exception):  # the later build reports the error
            self._model = build(
                self._spec, num_classes=self._num_classes, input_shape=self._input_shape, seed=self._seed, tried=True
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        if self._thread is not None:
            self._thread.join()
            self._thread = None
        torch.set_num_threads(self._before)
        gc.enable()

    def take(self) -> nn.Module | None:
        """The model at the first call; None later, or if it could not be built."""
        model, self._model = self._model, None
        return model

    def __getstate__(self) -> dict[str, Any]:
        """State for a spawned process, without the model: building it there takes no longer than sending it."""
        return {**self.__dict__, "_model": None, "_thread": None}
