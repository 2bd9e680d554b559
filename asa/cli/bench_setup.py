"""Preparation of ``asa bench``: devices, links and images; reports errors before anything is measured."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import asa
from asa.cli import choose, places
from asa.cli.console import Console
from asa.cli.options import input_shape
from asa.cli.verb import Arguments
from asa.errors import UnavailableError, UsageError
from asa.ir import bench as nouns
from asa.ir import codec
from asa.ir.chips import other_gpu
from asa.ir.cluster import Cluster
from asa.ir.consistency import is_discipline, parse
from asa.launch import cuda_devices, usable_cores
from asa.strategies import offered
from asa.zoo import specs

if TYPE_CHECKING:
    from asa.zoo.data import ImageSet

DeviceType = Literal["cpu", "cuda"]

STRATEGIES = ("single", "ddp", "tensor", "hybrid", "asa")
MEASURE_LIMIT_S = 30.0
RANKS_PER_CORE = 32
"""Largest number of processes per core; more are treated as a mistake of the user."""


def device_of(args: Arguments) -> tuple[DeviceType, int]:
    """Kind and number of devices to compare on.

    Raises:
        UnavailableError: there are CUDA devices, but fewer than requested.
        UsageError: more ranks than the cores could ever run.
    """
    cuda = cuda_devices() if args.device in ("auto", "cuda") else 0
    if cuda and (args.gpus or 1) > cuda:
        raise UnavailableError(f"{args.gpus} ranks need {args.gpus} CUDA devices, this machine has {cuda}")
    if not cuda and (args.gpus or 1) > RANKS_PER_CORE * usable_cores():
        raise UsageError(
            f"asked for {args.gpus} ranks on {usable_cores()} cores, the most is {RANKS_PER_CORE * usable_cores()}; "
            "lower --gpus (a run on other machines is predicted by `asa plan --cluster NAME`)"
        )
    return ("cuda", args.gpus or cuda) if cuda else ("cpu", args.gpus or min(8, usable_cores()))


def check(args: Arguments, console: Console, device: DeviceType, gpus: int) -> None:
    """Check names and files before minutes of measuring, and settle the number of classes.

    Raises:
        UsageError: no such model, strategy or cluster, or data with more classes than requested.
        InvalidInputError: files of the data set that cannot be used.
    """
    from asa.planner.space import baselines

    specs.check_there(args.data)
    if args.cluster:
        local_cluster(args, console, device, gpus)
    if args.classes is not None:
        specs.check_classes(args.data, specs.CLASSES.get(args.data, 0), args.classes)
    baselines.check(args.strategies or STRATEGIES, offered(), gpus)
    for discipline in map(parse, filter(is_discipline, args.strategies or ())):
        if discipline.name == "hogwild" or discipline.quorum is not None:
            raise UsageError(
                f"{discipline}: its ranks never take a step together, and a comparison takes turns; time it with "
                "asa train, or leave it out"
            )
    from asa.zoo.models import build, default_input, names

    model_names, asked = names(), args.classes
    for model in args.models:
        if model not in model_names:
            shape, classes = default_input(model, input_shape(args), asked)
            build(model, num_classes=classes, input_shape=shape)
        train = training_samples(args, console, model, asked)
        adopt_classes(args, console, model, train)
        # Emulated devices have a profile of their own, whose batch is checked once it is read.
        batch = choose.local_batch(args, console, model, device, gpus) if isinstance(args.device, str) else 1
        check_data(args, train, args.classes or train.num_classes, batch)


def training_samples(args: Arguments, console: Console, model: str, classes: int | None) -> ImageSet:
    """Training samples in the input shape of ``model`` with ``classes`` classes. If they are rows of numbers, and no
    input shape was given, it becomes that of a row.

    Raises:
        UsageError, InvalidInputError, UnavailableError: the data cannot be used, or not by this model.
    """
    from asa.zoo.data.own import TableError
    from asa.zoo.models import build, default_input

    shape, number = default_input(model, input_shape(args), classes)
    try:
        return images(args.data, args.data_root, shape)[0]
    except TableError as error:
        if input_shape(args) is not None:
            raise
        try:
            build(model, num_classes=number, input_shape=error.shape)
        except UsageError:
            columns = f"{args.data} has rows of {error.shape[-1]} numbers"
            raise UsageError(f"{columns}, which {model} cannot take; take a model that can, as logistic") from None
        args.replace(input=error.shape)
        console.say(f"asa: --input {'x'.join(map(str, error.shape))}, as {args.data} has")
        return images(args.data, args.data_root, error.shape)[0]


def adopt_classes(args: Arguments, console: Console, model: str, train: ImageSet) -> None:
    """Give ``model`` as many classes as data of the user's own have, where it takes any number. A model of tokens keeps
    its vocabulary.

    Raises:
        UsageError: the data have a class for every pixel, and the model gives one for an image.
    """
    from asa.zoo.foreign import takes_classes
    from asa.zoo.inputs import of_tokens
    from asa.zoo.models import segmentation_names

    if train.labels.dim() == 3 and ":" not in model and model not in ("unet", *segmentation_names()):
        raise UsageError(
            f"{args.data} has a class for every pixel, {model} gives one for an image; take a segmentation model, as "
            "unet or fcn_resnet50"
        )

    if args.classes is None and specs.is_own(args.data) and not of_tokens(train.shape) and takes_classes(model):
        args.replace(classes=train.num_classes)
        console.say(f"asa: --classes {train.num_classes}, as {args.data} has")


def check_data(args: Arguments, train: ImageSet, num_classes: int, global_batch: int) -> None:
    """Check that a model with ``num_classes`` classes can be trained on ``train`` in batches of ``global_batch``
    samples.

    Raises:
        UsageError: the data have too many classes or too few samples.
    """
    specs.check_classes(args.data, train.num_classes, num_classes)
    if global_batch > len(train):
        raise UsageError(
            f"a global batch of {global_batch} is larger than the {len(train)} training samples of {args.data}; "
            f"try --global-batch {len(train)}"
        )


def local_cluster(args: Arguments, console: Console, device: DeviceType, gpus: int) -> Cluster:
    """The named cluster, or one measured on this machine: the newest stored one, or a new measurement.

    Raises:
        UsageError: the named cluster has other devices than this machine, or is too small.
    """
    if args.cluster:
        named = choose.named_cluster(args.cluster)
        if named.device.type != device or named.num_devices < gpus:
            raise UsageError(
                f"cluster {named.name} has {named.num_devices} {named.device.type} devices, this command runs on "
                f"{gpus} of {device}; leave out --cluster to measure one, or change --gpus or --device"
            )
        here = machine(device, gpus).device_name if device == "cuda" else named.device.name
        if other_gpu(named.device.name, here):
            raise UsageError(
                f"cluster {named.name} has {named.device.name}, this command runs on {here}; leave out --cluster, or "
                f"predict with `asa plan --cluster {named.name}`"
            )
        return named
    from asa.profiler.interconnect import measure_cluster

    name = choose.local_device(device).name
    stored = [c for _, c in places.clusters(console) if c.device.type == device and c.device.name == name]
    large_enough = [c for c in stored if c.num_devices >= gpus]
    if large_enough:
        # The smallest cluster was measured with the fewest idle ranks beside the working ones.
        return min(large_enough, key=lambda c: c.num_devices)
    console.say(f"asa: no cluster file is of {name}: its links are measured first, for up to {MEASURE_LIMIT_S:.0f} s")
    with console.progress(f"measuring {gpus} ranks") as report:
        cluster = measure_cluster(
            gpus, backend="nccl" if device == "cuda" else "gloo", time_limit_s=MEASURE_LIMIT_S, progress=report
        )
    path = places.cluster_path(cluster)
    with places.keeping(console, path):
        codec.save(cluster, path)
    return cluster


def images(name: str, root: str | None, shape: tuple[int, ...]) -> tuple[ImageSet, ImageSet]:
    """Training and test images in the model's input shape; called on every rank."""
    from asa.zoo.data import open_split

    folder = Path(root) if root else None
    train = open_split(name, split="train", root=folder, input_shape=shape)
    return train, open_split(name, split="test", root=folder, input_shape=shape)


def stand_in(shape: tuple[int, ...], classes: int) -> tuple[ImageSet, ImageSet]:
    """Synthetic images for a model with any number of classes, if only the time of a step matters."""
    sets = [replace(s, **_with_fewer_classes(s, classes)) for s in images("synthetic", None, shape)]
    return sets[0], sets[1]


def _with_fewer_classes(images: ImageSet, classes: int) -> dict[str, Any]:
    """Replacements for the fields of an image set, if a model has fewer classes or knows fewer tokens."""
    replacements: dict[str, Any] = {"labels": images.labels % classes, "num_classes": min(classes, images.num_classes)}
    return replacements | ({"images": images.images % classes} if len(images.shape) == 1 else {})


def machine(device: DeviceType, gpus: int) -> nouns.BenchEnvironment:
    """Description of this machine, for documents of a run with ``gpus`` ranks."""
    import torch

    return nouns.BenchEnvironment(
        device_type=device,
        device_name=choose.local_device(device).name,
        num_devices=gpus,
        cpu_cores=usable_cores(),
        backend="nccl" if device == "cuda" else "gloo",
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        asa_version=asa.__version__,
    )
