"""Measurements of ``asa profile --staleness``: curves of training, stored beside the profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asa.cli import bench_setup, places
from asa.cli.console import Console
from asa.cli.verb import Arguments
from asa.errors import UsageError
from asa.ir import codec
from asa.ir.consistency import Discipline, parse
from asa.ir.staleness import Staleness, usual_settings

if TYPE_CHECKING:
    from asa.ir.profile import Profile
    from asa.profiler.staleness import Task

_LOOKS = 40
"""Number of evaluations in a run; a shorter run is evaluated after each step."""


def check(args: Arguments) -> None:
    """Check the disciplines, and that the data can be opened, before minutes go into the profile.

    Raises:
        UsageError: no such discipline, or data and model or batch do not fit together.
        InvalidInputError: files are missing or unusable.
    """
    from asa.cli.options import input_shape
    from asa.zoo.models import default_input
    from asa.zoo.specs import check_classes

    usual_settings(args.workers, 0.9, _asked(args))
    shape, classes = default_input(args.model, input_shape(args), args.classes)
    train = bench_setup.images(args.data, args.data_root, shape)[0]
    check_classes(args.data, train.num_classes, classes)
    batch = args.global_batch or 64
    if batch > len(train):
        raise UsageError(f"a global batch of {batch} of {len(train)} samples; ask for --global-batch {len(train)}")
    if batch < 2 * args.workers:
        raise UsageError(
            f"a global batch of {batch} gives {args.workers} workers fewer than 2 rows each; ask for --global-batch "
            f"{2 * args.workers} or fewer --workers"
        )


def _asked(args: Arguments) -> list[Discipline]:
    return [parse(name) for name in args.strategies or ()]


def measure(args: Arguments, console: Console, profile: Profile, profile_path: Path) -> tuple[Staleness, Path]:
    """Measure the curves of ``profile``'s model on this machine; returns them with the path of their file."""
    import torch

    from asa import __version__
    from asa.profiler.clock import one_thread
    from asa.profiler.machine import choose_device
    from asa.profiler.staleness import measured

    task = task_of(args, profile)
    every = max(1, args.steps // _LOOKS)
    with console.progress(f"staleness of {args.model}") as report, one_thread(choose_device(args.device)):
        curves, skipped = measured(
            task, usual_settings(args.workers, task.momentum, _asked(args)),
            seeds=args.seeds, steps=args.steps, every=every, time_limit_s=args.staleness_limit, progress=report,
        )  # fmt: skip
    staleness = Staleness(
        model_spec=profile.model_spec,
        model_fingerprint=profile.model_fingerprint,
        input_shape=profile.graph.input_shape,
        num_classes=profile.graph.num_classes,
        data=args.data,
        optimizer=args.optimizer,
        learning_rate=task.lr,
        momentum=task.momentum,
        weight_decay=task.weight_decay,
        global_batch=task.global_batch,
        workers=args.workers,
        steps=args.steps,
        every=every,
        curves=curves,
        created=codec.now(),
        asa_version=__version__,
        torch_version=torch.__version__,
        device=profile.device.name,
        skipped=skipped,
        schedule="as in training",
    )
    path = places.staleness_path(profile_path, args.optimizer, args.workers)
    with places.keeping(console, path):
        codec.save(staleness, path)
    return staleness, path


def task_of(args: Arguments, profile: Profile) -> Task:
    """The training task: the model of ``profile`` on the requested data, with the schedule of `asa train` over the
    requested number of steps; its peak is the default learning rate unless given."""
    import torch

    from asa.executor.model.loss import hits_of, loss_of
    from asa.executor.training.optimizer import learning_rate
    from asa.executor.training.settings import LEARNING_RATE, WEIGHT_DECAY, TrainSettings
    from asa.profiler.machine import choose_device
    from asa.profiler.staleness import Task
    from asa.zoo.data import fetch
    from asa.zoo.models import build

    device = choose_device(args.device)
    shape, classes = profile.graph.input_shape, profile.graph.num_classes
    images, test = (s.to(device) for s in bench_setup.images(args.data, args.data_root, shape))

    def train(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples as `asa train` has them, shifted and mirrored at random."""
        count = len(images)
        number = int(positions[0]) // count
        return fetch(images, positions % count, train=True, seed=0, epoch=number, device=device)

    warmup = TrainSettings(out="").warm_up(args.steps)
    return Task(
        build=lambda seed: build(args.model, num_classes=classes, input_shape=shape, seed=seed).to(device),
        train=train,
        count=len(images),
        test=fetch(test, torch.arange(len(test)), train=False, seed=0, epoch=0, device=device),
        loss=loss_of,
        hits=hits_of,
        optimizer=args.optimizer,
        lr=args.lr or LEARNING_RATE[args.optimizer],
        momentum=0.9 if args.optimizer == "sgd" else 0.0,
        weight_decay=WEIGHT_DECAY[args.optimizer],
        global_batch=args.global_batch or 64,
        schedule=lambda progress, step: learning_rate(progress, 1.0, warmup=warmup, step=step),
    )
