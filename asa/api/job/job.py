"""``asa.Job``: complete training on the user's own loader, with everything a plan may use."""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from asa.api.arguments import check_training, read
from asa.api.calls import Call, requires_several
from asa.api.job.builder import Builder
from asa.api.job.executor import UserData, UserExecutor
from asa.api.job.log import begin, concluded
from asa.api.job.loss import LossWeight, copied
from asa.api.job.schedules import Schedules
from asa.api.job.validation import Metric
from asa.api.loop.parallelize import SEVERAL, cache_folder, find_call, find_written, kept_whole
from asa.api.messages import naming_arguments, say
from asa.api.model.coupling import CHANGED, Scored, changes_inputs, coupled, fewest_rows, warning_of
from asa.api.model.distributed_model import check_new
from asa.api.model.model_interface import MEETING_S
from asa.api.model.notes import check_exact, trained_norms
from asa.api.model.optimizers import Rebinding, check_shared, no_shards_because, planned_like
from asa.api.model.optimizers import elementwise as known_elementwise
from asa.api.model.whole_model import whole_plan
from asa.api.plans.planned import agreed_plan, checked_plan, cost_model
from asa.api.plans.planning import device_of, shaped, spec_of
from asa.api.plans.requests import PlanOptions
from asa.api.rank_context import ANNOUNCED, join_ranks, same_weights
from asa.api.steps.batches import GlobalBatches
from asa.api.tensors.names import StateNames
from asa.errors import UsageError, WorkersFailedError
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.step import microbatches_of
from asa.executor.running.outdir import CHECKPOINTS, check_run, owned
from asa.executor.training import checkpoint
from asa.executor.training.checkpoint import Manifest
from asa.executor.training.logs import RunLog, known
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.measurements import EpochRecord
from asa.ir.plan import Plan
from asa.ir.profile import Precision
from asa.ir.units import time_span
from asa.launch import faults, give_back_freed_memory, latecomer, store_of_ranks
from asa.launch.worker import others_may_leave
from asa.scheduler import Loop, Model, Policy
from asa.sharding.layers.batchnorm import without_torch_groups
from asa.tracing import TracedModel, called


class Job:
    """A model in training on the available ranks: pipelines, accumulation, checkpoints, re-planning, resume.

    ::

        job = asa.Job(model, optimizer, loader, loss_fn, out="runs/mine")
        for record in job.run(epochs=10):
            print(record.epoch, record.train_loss)

    Every rank makes the job and makes the same calls: under ``torchrun``, in an existing process group, or alone.
    ``loss_fn(output, labels)`` is a mean over the batch; batches are ``(input, labels)``, or are converted by
    ``split``. A step is one batch of the loader, as on one device: its samples, its order, one update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        plan: Plan | Path | str = "auto",
        *,
        validation: Any = None,
        weight: LossWeight = None,
        metric: Metric | None = None,
        out: Path | str | None = None,
        resume: bool = False,
        replan: bool = True,
        observe: bool = True,
        split: Callable[[Any], tuple[Any, Any]] | None = None,
        example_input: Any = None,
        cluster: Cluster | Path | str | None = None,
        strategies: Sequence[str] | str | None = None,
        pins: Sequence[str] | str = (),
        memory_bytes: int | None = None,
        precision: Precision = "fp32",
        batch_norm: Literal["local", "exact"] = "local",
        device: str = "auto",
        elementwise: bool | None = None,
        max_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scheduler_every: Literal["epoch", "step"] = "epoch",
        seed: int = 0,
        log_every: int = 50,
        keep: int = 2,
        save_every: float | str | None = None,
        time_limit_s: float = 15.0,
        cache: Path | str | None = "auto",
        timeout_s: float = 300.0,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Make a plan (unless one is given) and distribute the model.

        Args:
            validation: a loader; its mean loss is computed after every epoch.
            weight: for a loss that is a mean, but not over samples: a function of the labels that returns its
                denominator. ``sum`` for a loss that is a sum. Not needed for a cross-entropy with class weights or
                ignored targets.
            metric: function from the output and the labels of N samples to a tensor of N figures; their mean over the
                validation loader is the record's ``validation_accuracy``. By default the share of correct classes; NaN
                if labels are not class numbers.
            out: folder of the run, for its log, its result, and checkpoints after every epoch and on SIGTERM; nothing
                is written without it.
            resume: continue from the newest checkpoint in ``out``, written under this plan or another.
            replan: change the plan if step times differ from the prediction and the change saves time. A given plan is
                not changed, nor is that of a model that runs as a whole; rank 0 then prints a note.
            observe: record for every step each rank's computation and its waiting for others.
            save_every: interval in seconds (or ``"10m"``) of checkpoints within an epoch.
            split: function from a batch to ``(inputs, labels)``. By default these are its first and second item; a
                dictionary is used as both: ``model(**batch)`` and ``loss_fn(output, batch)``. A tuple of inputs is
                passed by position, a dictionary by name.
            max_norm: largest norm of all gradients of the model; they are scaled down to it in every step.
            scheduler: one or several learning rate schedulers of ``optimizer``. The job steps them after every epoch or
                every update (``scheduler_every``) and stores them in its checkpoints.
            seed: seed of the order of samples (another order in each epoch) and of dropout.
            on_event: called on rank 0 with the events that ``asa train`` writes to its log. Findings and changes of
                plan are also written to standard error, one line each.
            model, optimizer, loader, and the others: as for :func:`asa.parallelize`.

        Raises:
            UsageError, InfeasibleError: see :func:`asa.parallelize`; a folder that belongs to another run.
            NoCheckpointError: nothing to resume.
        """
        faults.arm()
        if resume and out is None:
            raise UsageError("resume needs out, the folder of the run to go on with")
        if save_every is not None and out is None:
            raise UsageError("save_every needs out, the folder of the run to save to")
        saving = _seconds(save_every)
        check_training(model, optimizer, loader)
        wishes = read(
            strategies=strategies, pins=pins, memory_bytes=memory_bytes, cluster=cluster, precision=precision,
            time_limit_s=time_limit_s,
        )  # fmt: skip
        read(plan=plan, batch_norm=batch_norm, seed=seed, cache=cache, timeout_s=timeout_s, max_norm=max_norm)
        if not callable(loss_fn):
            raise UsageError(f"loss_fn is a function of outputs and labels; it was of type {type(loss_fn).__name__}")
        check_new(model)
        if without_torch_groups(model):
            batch_norm = "exact"
        schedules = Schedules(optimizer, scheduler, scheduler_every)
        self._context = context = join_ranks(device, timeout_s)
        late, context.votes.announced = latecomer() is not None, []
        self._stack = ExitStack()
        if out is not None and not late:  # before minutes of profiling
            with naming_arguments():
                context.votes.once(partial(check_run, Path(out), resume=resume))
        self._replan = replan
        self._loop: Loop | None = None
        votes = context.votes
        batches = GlobalBatches(loader, votes, lambda total: self._executor.rows(total))
        shaped(model)
        check_shared(optimizer)
        rebinding = Rebinding(optimizer, model, elementwise=known_elementwise(optimizer, elementwise))
        same_weights(context, model)
        divide = split or (_several_and_labels if requires_several(model) else _pair)
        if example_input is None:
            example_input = divide(batches.example())[0]
        call, why = find_call(context, model, batches, example_input)
        writes = find_written(context, model, call)
        self._options = options = PlanOptions(
            global_batch=batches.batch_size, optimizer=planned_like(optimizer, context), pipelines=True,
            cache=cache_folder(cache), **wishes,
            no_shards_because=no_shards_because(optimizer, model, elementwise) or kept_whole(writes),
            at_once=batch_norm == "exact" and bool(trained_norms(model)),
        )  # fmt: skip
        self._origins = None
        if writes and plan == "auto" and not why:  # components compute outputs, and change nothing
            why = f"its forward changes {writes[0]}"
        example = torch.zeros(2, 1) if call is None or call.tensor is None else call.tensor

        def subject(of: nn.Module) -> nn.Module | TracedModel:
            return called(of, name=spec_of(model), reason=why) if why else of

        undivided = subject(model)
        if plan != "auto":
            chosen = checked_plan(context, plan)
        elif isinstance(undivided, TracedModel):
            chosen = whole_plan(context, model, undivided, call, options, why)
            say(context, f"the model runs whole under {chosen.strategy}: {why}")
        else:
            chosen, self._origins = agreed_plan(context, model, example, options)

        settings = TrainSettings(
            out=str(out or ""), data="loader", seed=seed, batch_norm=batch_norm, log_every=log_every, keep=keep,
            timeout_s=timeout_s, optimizer=options.optimizer, observe=observe, save_every_s=saving,
        )  # fmt: skip

        if replan and context.rank == 0 and context.ranks > 1 and self._origins is None and chosen.consistency is None:
            why_fixed = "the model runs whole" if plan == "auto" else "it was handed in; plan='auto' adapts"
            say(context, f"the plan stays, whatever steps take ({why_fixed})")
        norms = trained_norms(model)
        if batch_norm == "exact":
            check_exact(chosen, norms)
        change = coupled(model, call, exact=batch_norm == "exact") if context.rank == 0 else 0.0
        for line in warning_of(change, chosen):
            warnings.warn(line, stacklevel=2)
        trial = copied(loss_fn)
        several = None if trial is None or chosen.num_ranks == 1 else _several(batches, divide)
        needs = int(votes.tell(fewest_rows(Scored(model, trial), several) if context.rank == 0 else 1))
        changed = bool(votes.tell(context.rank == 0 and changes_inputs(model, call)))
        if changed and not batches.indexed and context.rank == 0:
            warnings.warn(CHANGED, stacklevel=2)
        _check_samples(chosen, options.global_batch, needs)
        self._names = StateNames(model)
        if out is not None and self._names.extra and context.rank == 0:
            warnings.warn(
                f"checkpoints do not keep {next(iter(self._names.extra))} (get_extra_state), so a job that resumes has "
                "that of the model that is handed in: save it yourself, or make it a buffer",
                stacklevel=2,
            )
        discipline = chosen.consistency
        if discipline is not None and not discipline.lockstep:
            if context.rank == 0 and context.ranks > 1:
                store_of_ranks().set(ANNOUNCED, json.dumps(votes.announced))
            votes = batches.votes = StarVotes(timeout_s)  # the others continue without a lost rank
            self._context = context = replace(context, votes=votes)
        context.votes.announced = None
        replans = replan and discipline is None and context.ranks > 1
        builder = Builder(
            model, subject, example.to(device_of(model)), context, settings, norms=norms, writes=writes,
            replans=replans, late=late,
        )  # fmt: skip
        resumed_from: tuple[Path, Manifest] | None = None
        self._log: RunLog | None = None
        self._on_event = on_event if context.rank == 0 else None
        if out is not None:
            with naming_arguments():
                votes.once(lambda: self._stack.enter_context(owned(Path(out), resume=resume)))
                if resume and not late:
                    resumed_from = self._chosen_checkpoint(Path(out) / CHECKPOINTS)
            self._log = RunLog(Path(out)) if context.rank == 0 else None
        with naming_arguments():
            self._executor = UserExecutor(
                chosen,
                builder,
                settings,
                rebinding=rebinding,
                data=UserData(
                    batches=batches,
                    split=divide,
                    validation=validation,
                    loss_fn=loss_fn,
                    weight=weight,
                    metric=metric,
                    changed=changed,
                ),
                context=context,
                announce=self._announce,
                folder=None if out is None else Path(out) / CHECKPOINTS,
                run=str(votes.tell(secrets.token_hex(4))),
                schedules=schedules,
                max_norm=max_norm,
                needs=needs,
            )
        give_back_freed_memory()  # tracing used much memory
        if resumed_from is not None:
            self._executor.restore(*resumed_from)
        if out is not None:
            votes.once(partial(begin, self._log, self._executor.plan, settings, context, self.step, self.epoch, resume))

    def _announce(self, event: dict[str, Any]) -> None:
        from asa.report.text.story import said  # not before there is something to say

        if (line := said(event)) is not None:
            say(self._context, line)
        if self._log is not None:
            self._log(known(event))
        if self._on_event is not None:
            self._on_event(event)

    def _chosen_checkpoint(self, folder: Path) -> tuple[Path, Manifest]:
        votes = self._context.votes
        newest = votes.once(lambda: checkpoint.find(folder))
        path = Path(votes.tell(None if newest is None else str(newest.path)))
        return path, codec.load(Manifest, path / checkpoint.MANIFEST)

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self._executor.plan

    @property
    def model(self) -> ParallelModel:
        """This rank's part of the model."""
        return self._executor.model

    @property
    def optimizer(self) -> Optimizer:
        """The given optimizer, over what this rank updates."""
        return self._executor.optimizer

    @property
    def step(self) -> int:
        """Number of updates since the start of the run."""
        return self._executor.step

    @property
    def epoch(self) -> int:
        """The epoch to run next, or to continue."""
        return self._executor.next_epoch

    def train_step(self, batch: Any = None) -> float:
        """Make one update on a global batch, the same on every rank, or on the loader's next; returns its mean loss
        (collective)."""
        with naming_arguments(), others_may_leave():
            return self._executor.train_step(batch)

    def run(self, epochs: int) -> list[EpochRecord]:
        """Train through epoch ``epochs - 1``, counted from the start of the run; returns a record of each epoch.

        Raises:
            PreemptedError: SIGTERM; everything is saved in ``out``.
            WorkersFailedError: another rank is gone, the loss is no longer finite, or ranks are no longer in step.
        """
        return list(self.epochs(epochs))

    def epochs(self, epochs: int) -> Iterator[EpochRecord]:
        """Yield the records of :meth:`run` one at a time, for instance to change the learning rate in between.

        Under a discipline that continues without lost ranks, a rank that comes back enters at the start of an epoch,
        and has records only from there on.
        """
        executor = self._executor
        with others_may_leave(), executor.stop.listening():
            if not executor.entered and not executor.enter():
                return
            executor.advance()
            with concluded(self._log), naming_arguments():
                while True:
                    rounds = range(executor.next_epoch, epochs)
                    try:
                        yield from self._adaptive_loop().run(rounds)
                        return
                    except WorkersFailedError as error:
                        if not executor.was_left_behind(error):
                            raise
                        if not executor.enter():
                            return

    def _adaptive_loop(self) -> Loop:
        """The loop over epochs, which remembers between calls of :meth:`epochs` what it has learnt."""
        if self._loop is None:
            lockstep = self.plan.consistency is None
            able = self._replan and lockstep and self._origins is not None
            model, policy = self._model() if lockstep else None, Policy(keep_plan=not able)
            self._loop = Loop(self._executor, self._announce, model, policy)
        return self._loop

    def _model(self) -> Model | None:
        """The cost model for re-planning on rank 0, which has the plan's profile and cluster; None on other ranks."""
        if self._origins is None:
            return None
        return cost_model(self._origins, self._options)

    def save(self) -> Path:
        """Commit a checkpoint now (collective); returns its path.

        Raises:
            UsageError: the job has no folder. UnavailableError: it cannot be written.
        """
        self.model.meet("job.save()", within_s=MEETING_S)
        with naming_arguments():
            return self._executor.commit()

    def state_dict(self) -> dict[str, Tensor]:
        """Full weights and buffers under the model's own names, on the CPU of every rank (collective)."""
        self.model.meet("job.state_dict()", within_s=MEETING_S)
        self._executor.synchronize()
        return self._names.full(self.model, self._context.votes)

    def close(self) -> None:
        """Destroy the plan's process groups and release the folder (collective)."""
        self._executor.close()
        self._stack.close()


def _seconds(save_every: float | str | None) -> float | None:
    """Seconds between checkpoints within an epoch; None if there are to be none."""
    try:
        return None if save_every is None else time_span(str(save_every))
    except ValueError as error:
        raise UsageError(f"save_every: {error}") from None


def _check_samples(plan: Plan, batch: int, needs: int) -> None:
    """Check that every rank computes the loss of ``needs`` samples of a batch, if a batch has as many.

    Raises:
        UsageError: a rank has fewer.
    """
    least = plan.fewest(batch, microbatches_of(plan, batch, needs))
    if least < needs <= batch:
        raise UsageError(
            f"the loss cannot be computed of fewer than {needs} samples, and this plan has a rank compute it of "
            f"{least} of a batch of {batch}: use larger batches, or a plan with fewer ranks"
        )


def _several(batches: GlobalBatches, divide: Callable[[Any], tuple[Any, Any]]) -> Call | None:
    """Inputs and labels of a few samples, to test the loss; None if the loader or the split fails."""
    try:
        return Call(divide(batches.example(min(SEVERAL, batches.batch_size))))
    except Exception:  # whatever a data set or a collate_fn raises
        return None


def _several_and_labels(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels for a model of several inputs, of which torch's loaders make a list."""
    inputs, labels = _pair(batch)
    return (tuple(inputs) if type(inputs) is list else inputs), labels


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return batch, batch
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return batch[0], batch[1]
    raise UsageError(f"a batch of type {type(batch).__name__} is not (input, labels); say what is what with split")
