"""Learning rate schedules of a Job: stepped during training, saved in its checkpoints, restored on resume."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from asa.errors import UsageError

Every = Literal["epoch", "step"]

FILE = "schedules.safetensors"
"""Keys of a checkpoint: the schedules, and the numbers of the optimizer's groups."""


class Schedules:
    """The schedulers of one optimizer, which step after every epoch or after every update."""

    def __init__(
        self, optimizer: Optimizer, schedulers: LRScheduler | Sequence[LRScheduler] | None, every: Every
    ) -> None:
        """Check the schedulers of ``optimizer``.

        Raises:
            UsageError: a scheduler of another optimizer, or one that needs a loss after every step.
        """
        if every not in ("epoch", "step"):
            raise UsageError(f"a schedule steps every 'epoch' or every 'step', asked {every!r}")
        listed = [] if schedulers is None else [schedulers] if isinstance(schedulers, LRScheduler) else list(schedulers)
        for each in listed:
            if each.optimizer is not optimizer:
                raise UsageError(f"{type(each).__name__} is a schedule of another optimizer than the Job's")
            if isinstance(each, ReduceLROnPlateau) and every == "step":
                raise UsageError("ReduceLROnPlateau looks at the loss of an epoch: scheduler_every='epoch'")
        self._optimizer, self._schedulers, self._every = optimizer, listed, every

    def stepped(self) -> None:
        """Step after an update."""
        if self._every == "step":
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a schedule before any step
            for each in self._schedulers:
                each.step()

    def epoch_ended(self, loss: float) -> None:
        """Step after an epoch. ``loss``: over the validation data if there are any; NaN if there is no loss, and
        schedules that need one are not stepped then."""
        if self._every == "epoch":
            for each in self._schedulers:
                if isinstance(each, ReduceLROnPlateau):
                    if not math.isnan(loss):
                        each.step(loss)
                else:
                    each.step()

    def state(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        buffer = io.BytesIO()
        torch.save({"groups": groups, "schedules": [s.state_dict() for s in self._schedulers]}, buffer)
        return {"schedules": torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state`.

        Raises:
            UsageError: it has other schedules or groups.
        """
        content: dict[str, Any] = torch.load(io.BytesIO(state["schedules"].numpy().tobytes()), weights_only=True)
        groups, schedules = self._optimizer.param_groups, content["schedules"]
        if len(schedules) != len(self._schedulers) or len(groups) != len(content["groups"]):
            raise UsageError(
                f"the checkpoint has {len(schedules)} schedules and {len(content['groups'])} groups of parameters, "
                f"this job has {len(self._schedulers)} and {len(groups)}"
            )
        for group, saved in zip(groups, content["groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("foreach", "fused", "capturable")})
        for each, saved in zip(self._schedulers, schedules, strict=True):
            each.load_state_dict(saved)
