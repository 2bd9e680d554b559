"""The samples of each step: one order for the whole job, independent of the strategy and the number of ranks."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from asa.errors import UsageError
from asa.zoo.data.draws import key, permutation

_ORDER = 1


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, num_samples: int) -> Tensor:
    return permutation(key(seed, epoch, _ORDER), num_samples)


class GlobalOrder:
    """The order of global sample indices, epoch by epoch.

    An epoch is a permutation of 0..num_samples-1 that depends only on (seed, epoch). It is cut into batches of
    ``global_batch``; a shorter last batch is left out with ``drop_last``. A *position* counts global samples since the
    start of the job, so it keeps its meaning when the number of ranks changes.
    """

    def __init__(self, num_samples: int, global_batch: int, seed: int, *, drop_last: bool = False) -> None:
        """Make the order of ``num_samples`` samples in batches of ``global_batch``.

        Raises:
            UsageError: less than one sample or batch, or (with ``drop_last``) a batch larger than the data set.
        """
        if num_samples < 1 or global_batch < 1:
            raise UsageError(f"{num_samples} samples in batches of {global_batch}: both must be at least 1")
        if drop_last and global_batch > num_samples:
            raise UsageError(
                f"a global batch of {global_batch} is larger than the data set of {num_samples} images; "
                f"try --global-batch {num_samples}"
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = seed
        self.samples_per_epoch = num_samples - num_samples % global_batch if drop_last else num_samples

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.samples_per_epoch // self.global_batch)

    def position(self, epoch: int, step: int) -> int:
        """Number of global samples used before ``step`` of ``epoch``; ``step`` may be ``steps_per_epoch``, its end."""
        if epoch < 0 or not 0 <= step <= self.steps_per_epoch:
            raise ValueError(f"epoch {epoch} step {step} is not among steps 0..{self.steps_per_epoch}")
        return epoch * self.samples_per_epoch + min(step * self.global_batch, self.samples_per_epoch)

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, samples): the epoch at a position, and the number of samples used in it."""
        if position < 0:
            raise ValueError(f"position {position} is before the first sample")
        return divmod(position, self.samples_per_epoch)

    def at(self, position: int) -> Tensor:
        """The next batch from any position, also inside a batch (after a change of ``global_batch``): int64 [<=
        global_batch]. It ends with its epoch."""
        epoch, start = self.locate(position)
        stop = min(start + self.global_batch, self.samples_per_epoch)
        # A copy, because callers must not write to the cached permutation.
        return _shuffled(self.seed, epoch, self.num_samples)[start:stop].clone()

    def batch(self, epoch: int, step: int) -> Tensor:
        """Global sample indices of one step, in order: int64 [<= global_batch].

        Raises:
            ValueError: there is no such step.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"step {step} is not among the {self.steps_per_epoch} steps of an epoch")
        return self.at(self.position(epoch, step))
