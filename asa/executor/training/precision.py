"""Mixed precision: for fp16, one loss scale on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asa.errors import WorkersFailedError
from asa.executor.model.votes import Votes
from asa.ir.profile import Precision
from asa.sharding.collectives.waits import waits


class LossScale:
    """Dynamic loss scale of fp16 (Micikevicius et al. 2018); always 1 in other precisions.

    Ranks have different gradients. So in each step all ranks agree whether any gradient overflowed: either all ranks
    update, or none does.
    """

    GROW_AFTER = 2000
    LEAST = 2.0**-24
    """Scale below which fp16 has no gradient of a loss of 1 any more."""

    def __init__(self, precision: Precision, value: float | None = None) -> None:
        self.active = precision == "fp16"
        self.value = (value or 65536.0) if self.active else 1.0
        self._good = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale, the value from which backward starts."""
        return loss * self.value if self.active else loss

    @torch.no_grad()
    def unscale(self, parameters: Sequence[nn.Parameter], votes: Votes) -> bool:
        """Divide gradients by the scale. Returns whether to update with them. Collective in fp16.

        Raises:
            WorkersFailedError: gradients are not finite at any scale, so no step would update any more.
        """
        if not self.active:
            return True
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(1 / self.value)
        finite = [torch.isfinite(gradient).all() for gradient in gradients]
        good = not finite or bool(torch.stack(finite).all())
        mark = waits.begin()
        agreed = votes.everyone(good)
        if not (gradients and gradients[0].is_cuda):  # on CUDA the host does not wait here
            waits.end(mark)
        if agreed:
            self._good += 1
            if self._good % self.GROW_AFTER == 0:
                self.value *= 2
            return True
        self.value /= 2
        self._good = 0
        if self.value < self.LEAST:
            raise WorkersFailedError("gradients of fp16 are not finite, however small the loss is scaled; take bf16")
        return False
