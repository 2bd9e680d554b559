"""Saving, restoring and migrating the state of a run, by all ranks or by none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from asa.errors import InvalidInputError, UnavailableError
from asa.executor.model.state import full_optimizer_state, full_state, load_full_optimizer_state, load_full_state
from asa.executor.model.votes import Votes
from asa.executor.training import checkpoint
from asa.executor.training.checkpoint import Manifest, Store, StoredFile
from asa.executor.training.loadable import check_optimizer_state, check_weights
from asa.executor.training.logs import Announce
from asa.executor.training.migration import Traffic, move, parts_of, target_parts
from asa.executor.training.precision import LossScale
from asa.executor.training.settings import TrainSettings
from asa.executor.training.worker import Worker
from asa.ir.codec import fingerprint, now
from asa.launch import alive, faults

_MOST_TIMEOUTS = 10
"""Multiple of the run's timeout after which a disk that is still writing counts as broken."""
_LOOKS = 4
"""How often in a timeout ranks hear that another one is still writing."""


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Saves, restores and migrates a :class:`Worker`'s weights and optimizer state. Every method is collective."""

    folder: Path
    run: str
    settings: TrainSettings
    num_samples: int
    votes: Votes
    announce: Announce
    more: Callable[[], dict[str, dict[str, Tensor]]] = dict
    """Function that returns further files of a checkpoint, by name."""
    samples: Callable[[], str | None] = lambda: None
    """Function that returns the hash of the samples, if it is known."""

    def save(self, worker: Worker, *, step: int, position: int) -> Path:
        """Write a checkpoint. Returns its path. The plan's rank 0 writes, and all ranks vote on the outcome.

        Raises:
            UnavailableError: it cannot be written; raised on every rank. Earlier checkpoints are intact.
        """
        faults.reached("checkpoint.begin")
        worker.synchronize()
        # One rank writes before training continues. The others need no copies, and its tensors may alias the model's.
        writer = worker.model.all_processes[0]
        writes = self.votes.rank == writer
        tensors = {
            checkpoint.MODEL: full_state(worker.model, keep=writes, alias=True),
            checkpoint.OPTIMIZER: full_optimizer_state(worker.model, worker.optimizer, keep=writes, alias=True),
            **({checkpoint.DISCIPLINE: discipline_state} if (discipline_state := worker.discipline_state()) else {}),
            **self.more(),
        }
        path = self.folder
        error: Exception | None = None
        stored = prepared = False

        def store(write_files: Store) -> tuple[StoredFile, ...]:
            nonlocal stored
            stored = True
            return self._stored(write_files)

        def commit() -> None:
            nonlocal prepared
            prepared = True
            self.votes.agree(None)

        if writes:
            manifest = self._manifest(worker, step, position)
            try:
                path = checkpoint.write(
                    self.folder, manifest, tensors, commit=commit, store=store, keep=self.settings.keep
                )
            except Exception as caught:
                error = caught
        if not stored:
            self._stored(tuple)
        # All ranks vote twice: before the checkpoint is renamed into place, and on whether that succeeded.
        if not prepared:
            self.votes.agree(error)
        self.votes.agree(error)
        if writer:
            path = Path(self.votes.tell(str(path), source=writer))
        self.announce({"event": "checkpoint", "step": step, "path": str(path)})
        if self.votes.rank == 0 and not checkpoint.names_latest(path):
            message = f"{path} is saved; {path.parent / checkpoint.LATEST} cannot be written and does not name it"
            self.announce({"event": "note", "message": message})
        return path

    def _stored(self, write_files: Store) -> tuple[StoredFile, ...]:
        """The result of ``write_files``. All ranks wait for all of them (collective), also if that takes longer than
        the timeout of the run.

        Raises:
            UnavailableError: it takes longer than :data:`_MOST_TIMEOUTS` times the timeout.
            OSError: as ``write_files``.
        """
        results: list[tuple[StoredFile, ...]] = []
        errors: list[BaseException] = []

        def write() -> None:
            try:
                results.append(write_files())
            except BaseException as error:
                errors.append(error)

        timeout_s, began = self.settings.timeout_s, time.monotonic()
        thread = threading.Thread(target=write, daemon=True)  # a broken disk must not keep the process from ending
        try:
            thread.start()
        except RuntimeError:  # no memory for its stack
            write()
        waiting = True
        while waiting:
            if thread.ident is not None:
                thread.join(timeout_s / _LOOKS)
            late = time.monotonic() - began > _MOST_TIMEOUTS * timeout_s
            alive.beat()
            waiting = self.votes.anyone(thread.is_alive() and not late)
        if errors:
            raise errors[0]
        if not results:
            waited_s = time.monotonic() - began
            raise UnavailableError(
                f"cannot save to {self.folder}: the disk has not stored the files within {waited_s:.0f} s; earlier "
                "checkpoints are intact; take another disk or a longer timeout"
            )
        return results[0]

    def _manifest(self, worker: Worker, step: int, position: int) -> Manifest:
        plan = worker.model.whole_plan
        return Manifest(
            run=self.run,
            created=now(),
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
            settings=None if self.settings.data == "loader" else self.settings,
            samples=self.samples(),
        )

    def restore(self, worker: Worker, path: Path, manifest: Manifest) -> None:
        """Load a checked checkpoint into ``worker``.

        Raises:
            InvalidInputError: its tensors are not those of this model.
        """
        faults.reached("restore")
        error: Exception | None = None
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        try:
            weights, moments = (checkpoint.read(path, name) for name in (checkpoint.MODEL, checkpoint.OPTIMIZER))
            check_weights(worker.model, weights)
            check_optimizer_state(worker.model, moments, manifest.moments)
        except InvalidInputError as caught:
            error = caught
        except (KeyError, RuntimeError, ValueError) as caught:
            error = InvalidInputError(f"checkpoint {path} is not this model's: {caught}")
        self.votes.agree(error)  # all ranks agree before any rank changes its state
        load_full_state(worker.model, weights)
        load_full_optimizer_state(worker.model, worker.optimizer, moments)
        if worker.conduct is not None:
            worker.conduct.begin()
            if manifest.plan.consistency == worker.conduct.discipline and (path / checkpoint.DISCIPLINE).exists():
                worker.conduct.load(checkpoint.read(path, checkpoint.DISCIPLINE))
        worker.scale = LossScale(worker.precision, manifest.loss_scale)
        saved = manifest.plan.consistency
        kept = any(group.get("momentum", 1.0) for group in worker.optimizer.param_groups)  # adamw always has moments
        if kept and saved is not None and saved.own_moments and manifest.plan.num_ranks > 1 and manifest.position > 0:
            those = "those of rank 0" if moments else "none, as rank 0 had made no step"
            message = (
                f"under {saved} each of {manifest.plan.num_ranks} workers had momenta of its own, and the checkpoint "
                f"has {those}: all continue with these, where each would have continued with its own"
            )
            self.announce({"event": "note", "message": message})

    def move(self, old: Worker, build: Callable[[], Worker]) -> tuple[Worker, Traffic]:
        """Build a worker under another plan, and copy the state of ``old`` into it. Returns it, and what was moved.
        ``old`` itself is not changed.

        ``build`` makes the new worker, beginning with its process groups. An optimizer that it takes from ``old`` may
        lose its state there.

        Raises:
            WorkersFailedError: a process could not build it, or data was corrupted in transfer. Then no process has
                moved.
        """
        old.model.average_buffers()
        error: Exception | None = None
        new: Worker | None = None
        try:
            before = parts_of(old.model, old.optimizer)
            faults.reached("replan.build")
            new = build()
            after = target_parts(new.model)
            faults.reached("replan.move")
        except Exception as caught:
            error = caught
        try:
            self.votes.agree(error)
            assert new is not None
            traffic = move(before, after, new.model, new.optimizer, self.votes)
            self.votes.agree(_tried(lambda: faults.reached("replan.swap")))
        except BaseException:
            if new is not None:
                new.model.close()
            raise
        return new, traffic


def _tried(action: Callable[[], object]) -> Exception | None:
    """Run ``action`` and return the exception that it raised, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None
