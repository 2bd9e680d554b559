"""Checks and preparation before a run starts: devices, directory, data, checkpoint. Only the process that owns the run
does this."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asa.errors import AsaError, InvalidInputError, UsageError
from asa.executor.running import stored_settings
from asa.executor.running.outdir import CHECKPOINTS, owned
from asa.executor.training import checkpoint
from asa.executor.training.aims import Aims
from asa.executor.training.checkpoint import Manifest
from asa.executor.training.logs import RESULT, Announce, Event, RunLog, Work
from asa.executor.training.optimizer import try_out
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.consistency import bearable_one_late
from asa.ir.plan import Plan
from asa.launch import launched, usable_cores
from asa.launch.devices import check_cuda
from asa.zoo.data import ImageSet, open_split
from asa.zoo.inputs import of_tokens
from asa.zoo.sizes import SHAPES
from asa.zoo.specs import check_classes


def torchrun_line(num_ranks: int, command: Sequence[str]) -> str:
    """Command line with which torchrun starts the ranks of ``python -m asa <command>`` on this machine."""
    return f"torchrun --standalone --nproc-per-node {num_ranks} -m asa {shlex.join(command)}".rstrip()


def start_event(plan: Plan, settings: TrainSettings, **more: Any) -> Event:
    """The first event of a run; ``more`` are further fields of it."""
    return {"event": "start", "plan_fingerprint": codec.fingerprint(plan), "model": plan.model_spec,
            "global_batch": plan.global_batch, "settings": codec.to_data(settings), **more}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Material:
    """Inputs of a run: images, the name ``run``, and the checkpoint (path, manifest) from which it continues."""

    train: ImageSet
    test: ImageSet
    run: str
    resume: tuple[Path, Manifest] | None


def prepare(
    stack: ExitStack,
    plan: Plan,
    settings: TrainSettings,
    *,
    device_type: str,
    on_event: Announce | None,
    command: Sequence[str],
    work: Work | None = None,
) -> tuple[RunLog, Material]:
    """Lock the run's directory until ``stack`` closes, read the data, choose the checkpoint, and announce the start.

    Raises:
        AsaError: a check failed; ``result.json`` says so if the directory can be written.
    """
    notes = [*_check_devices(plan, device_type), *_late(plan, settings)]
    resume = settings.resume or _restarted(Path(settings.out))
    out = stack.enter_context(owned(Path(settings.out), resume=resume))
    log = RunLog(
        out, track=settings.trackers, work=work, target=settings.target_accuracy, price=settings.price,
        listener=on_event,
    )  # fmt: skip
    (out / RESULT).unlink(missing_ok=True)  # the result of an earlier run here is not this run's
    try:
        newest = checkpoint.find(out / CHECKPOINTS) if resume else None
        train, test = open_images(plan, settings)
        if settings.optimizer is not None:
            try_out(settings.optimizer, settings.lr)
        if len(train) < plan.global_batch:
            notes.append(
                f"the plan is for a batch of {plan.global_batch}, and the data have {len(train)} samples: every "
                "step has only these"
            )
        Aims.of(settings, plan.num_classes).try_out(settings, train.labels, plan.num_classes)
        if newest is not None:
            _check_resumable(newest.manifest, plan, settings, len(train))
            epoch = newest.manifest.position // len(train)
            log.recall(epoch)
            log.checkpoint = str(newest.path)
            is_done = epoch >= settings.epochs
            finished = f"; all {epoch} epochs are done; --epochs {epoch + 1} trains on" if is_done else ""
            notes += _other_samples(newest.manifest, settings, train)
            if len(log.epochs) < epoch:
                notes.append(f"the log tells of {len(log.epochs)} of the {epoch} epochs before; results have no others")
            notes += [*newest.notes, f"continuing after step {newest.manifest.step} ({newest.path.name}){finished}"]
        stored_settings.keep(plan, out / "plan.json")
        stored_settings.keep(settings, out / stored_settings.SETTINGS)
        log(start_event(
            plan, settings, ranks=plan.num_processes, device=device_type, data=[train.source, test.source],
            resumed_step=None if newest is None else newest.manifest.step,
            torchrun=torchrun_line(plan.num_processes, command), out=str(out),
        ))  # fmt: skip
        for note in notes:
            log({"event": "note", "message": note})
    except AsaError as error:
        log.finish(exit_code=error.exit_code, message=str(error))
        raise
    start_from = None if newest is None else (newest.path, newest.manifest)
    return log, Material(train=train, test=test, run=secrets.token_hex(4), resume=start_from)


def _restarted(out: Path) -> bool:
    """Whether torchrun has restarted all ranks after a failure; then the checkpoints in ``out`` are those of this
    run."""
    restarted = launched() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return restarted and any((out / CHECKPOINTS).glob("step_*"))


def open_images(plan: Plan, settings: TrainSettings) -> tuple[ImageSet, ImageSet]:
    """Training and test images in the model's input shape.

    Raises:
        UsageError: the data has more classes than the model.
        InvalidInputError: files cannot be used.
    """
    root = None if settings.data_root is None else Path(settings.data_root)
    shape = plan.sample_shape
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks with several threads cannot be forked from a process that has used several
    try:
        train = open_split(settings.data, split="train", root=root, input_shape=shape, download=settings.download)
        test = open_split(settings.data, split="test", root=root, input_shape=shape, download=settings.download)
    finally:
        torch.set_num_threads(threads)
    if of_tokens(shape) and train.labels.dim() == 1 and plan.model_spec in SHAPES:
        raise UsageError(
            f"{plan.model_spec} predicts the next token, {settings.data} has one class for a whole text; "
            "train a model that gives one answer for a sequence, as package.module:factory or hf:NAME"
        )
    check_classes(settings.data, train.num_classes, plan.num_classes)
    return train, test


def _check_devices(plan: Plan, device_type: str) -> list[str]:
    """Notes on running the plan on this machine. Ranks under a launcher are checked when they join.

    Raises:
        UnavailableError: the plan needs more CUDA devices than there are.
    """
    if launched():
        return []
    if device_type == "cuda":
        check_cuda(plan.num_processes, "train with --device cpu")
    elif plan.num_processes > usable_cores():
        return [f"{plan.num_processes} ranks share {usable_cores()} cores: steps will take longer than predicted"]
    return []


def _late(plan: Plan, settings: TrainSettings) -> list[str]:
    """A note on the learning rate if every gradient is one update old: how much less of it momentum bears then."""
    pipelined = plan.consistency is not None and plan.consistency.waiting == "pipelined" and len(plan.stages) > 1
    if not pipelined or (settings.optimizer or plan.optimizer) != "sgd":
        return []
    share = bearable_one_late(settings.momentum)
    effect = f"SGD with momentum {settings.momentum:g} bears 1/{1 / share:.0f} of the learning rate it bears in step"
    if settings.lr is not None:
        end = f"--lr {settings.lr:g} is stable if {settings.lr / share:.2g} is in step"
        return [f"{plan.consistency}: gradients are one update old, and {effect}; {end}"]
    rate = settings.peak_learning_rate("sgd")
    return [
        f"{plan.consistency}: gradients are one update old, and {effect}; it is {rate:g}: where the loss stays high, "
        f"take --lr {rate * share:.2g}"
    ]


def _check_resumable(manifest: Manifest, plan: Plan, settings: TrainSettings, num_samples: int) -> None:
    """Check that a checkpoint can be continued under this plan and these settings.

    Raises:
        InvalidInputError: it is of another model.
        UsageError: it has other data, another seed or another optimizer.
    """
    if manifest.model_fingerprint != plan.model_fingerprint:
        alike = manifest.model_spec == plan.model_spec
        raise InvalidInputError(
            f"the checkpoint is of {manifest.model_spec} ({manifest.model_fingerprint}), the plan of "
            f"{plan.model_spec} ({plan.model_fingerprint})"
            f"{', with another input, number of classes, or code' if alike else ''}; plan for the model of the run"
        )
    expected = {
        "data": settings.data,
        "num_samples": num_samples,
        "seed": settings.seed,
        "optimizer": settings.optimizer or plan.optimizer,
    }
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            raise UsageError(
                f"the checkpoint was made with {name} {getattr(manifest, name)}, this run has {value}; "
                "resume with the same, or choose another --out"
            )


def _other_samples(manifest: Manifest, settings: TrainSettings, train: ImageSet) -> list[str]:
    """A warning if the samples are not those on which the checkpoint was trained."""
    if manifest.samples is None or manifest.samples == train.sampled_digest():
        return []
    return [
        f"--data {settings.data} has other samples than at step {manifest.step}, as many of them: files were changed, "
        "or are read by another version of a package; training continues with these"
    ]
