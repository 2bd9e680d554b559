"""What must survive a rank: to the disk and back, and from one plan to another. All ranks do it, or none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from asa.errors import InvalidInputError, WorkersFailedError
from asa.executor import checkpoint
from asa.executor.checkpoint import Manifest
from asa.executor.logs import Announce
from asa.executor.precision import LossScale
from asa.executor.settings import TrainSettings
from asa.executor.state import full_optimizer_state, full_state, load_full_optimizer_state, load_full_state
from asa.executor.votes import Votes
from asa.executor.worker import Worker
from asa.ir.codec import fingerprint
from asa.launch import faults


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Saves, restores and moves a :class:`Worker`'s weights and optimizer state. Every call is collective."""

    folder: Path
    run: str
    settings: TrainSettings
    num_samples: int
    votes: Votes
    announce: Announce

    def save(self, worker: Worker, *, step: int, position: int) -> Path:
        """Commit a checkpoint; rank 0 writes, all vote. Where it is, as far as this rank knows.

        Raises:
            UnavailableError: it cannot be written; on every rank, and earlier ones are intact.
        """
        faults.reached("checkpoint.begin")
        worker.model.average_buffers()
        # Written before training goes on, by one rank: nobody else needs copies, and their memory is the model's.
        writes = self.votes.rank == 0
        tensors = {
            checkpoint.MODEL: full_state(worker.model, kept=writes, lent=True),
            checkpoint.OPTIMIZER: full_optimizer_state(worker.model, worker.optimizer, kept=writes, lent=True),
        }
        path = self.folder
        error: Exception | None = None
        prepared = False

        def commit() -> None:
            nonlocal prepared
            prepared = True
            self.votes.agree(None)

        if self.votes.rank == 0:
            manifest = self._manifest(worker, step, position)
            try:
                path = checkpoint.write(self.folder, manifest, tensors, commit=commit, keep=self.settings.keep)
            except Exception as caught:
                error = caught
        # Everybody votes twice: before the checkpoint appears, and on whether it did.
        if not prepared:
            self.votes.agree(error)
        self.votes.agree(error)
        self.announce({"event": "checkpoint", "step": step, "path": str(path)})
        return path

    def _manifest(self, worker: Worker, step: int, position: int) -> Manifest:
        plan = worker.model.plan
        return Manifest(
            run=self.run,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            step=step,
            position=position,
            seed=self.settings.seed,
            data=self.settings.data,
            num_samples=self.num_samples,
            global_batch=plan.global_batch,
            optimizer=self.settings.optimizer or plan.optimizer,
            loss_scale=worker.scale.value,
            model_spec=plan.model_spec,
            model_fingerprint=plan.model_fingerprint,
            plan=plan,
            plan_fingerprint=fingerprint(plan),
            files=(),
        )

    def restore(self, worker: Worker, path: Path, manifest: Manifest) -> None:
        """Put a checkpoint that was checked in place.

        Raises:
            InvalidInputError: its tensors are not those of this model.
        """
        faults.reached("restore")
        error: Exception | None = None
        try:
            load_full_state(worker.model, checkpoint.read(path, checkpoint.MODEL))
            moments = checkpoint.read(path, checkpoint.OPTIMIZER)
            load_full_optimizer_state(worker.model, worker.optimizer, moments)
        except (KeyError, RuntimeError, ValueError) as caught:
            error = InvalidInputError(f"checkpoint {path} is of another model: {caught}")
        self.votes.agree(error)
        worker.scale = LossScale(worker.precision, manifest.loss_scale)

    def move(self, old: Worker, build: Callable[[], Worker]) -> Worker:
        """A worker under another plan with the state of ``old``, which is left as it is.

        Raises:
            WorkersFailedError: a rank could not build it, or bits changed on the way.
        """
        old.model.average_buffers()
        weights, moments = full_state(old.model), full_optimizer_state(old.model, old.optimizer)
        error: Exception | None = None
        try:
            faults.reached("replan.build")
            new = build()
            faults.reached("replan.move")
            load_full_state(new.model, weights)
            load_full_optimizer_state(new.model, new.optimizer, moments)
        except Exception as caught:
            error = caught
        self.votes.agree(error)
        arrived = full_state(new.model), full_optimizer_state(new.model, new.optimizer)
        if not self.votes.everyone(_equal(arrived[0], weights) and _equal(arrived[1], moments)):
            new.model.close()
            raise WorkersFailedError("weights changed on the way to the new plan; the old one stays")
        faults.reached("replan.swap")
        return new


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bitwise: the same names, and the same bytes under each."""

    def raw(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return first.keys() == second.keys() and all(torch.equal(raw(first[n]), raw(second[n])) for n in first)
