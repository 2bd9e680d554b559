"""Estimated profiles from a model's structure alone, for devices that are elsewhere; the model is traced only once."""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import asa
from asa.cli import places
from asa.cli.options import input_shape
from asa.cli.verb import Arguments
from asa.cost.machine.estimate import estimate, trained_on_one
from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.profile import Profile
from asa.profiler.paths import slug
from asa.zoo.names import PACKAGES
from asa.zoo.sizes import SHAPES

if TYPE_CHECKING:
    from asa.ir.cluster import Cluster
    from asa.ir.graph import LayerGraph

_ROOMS = ("tracing", "sharding", "zoo", "ir")
"""Packages of ``asa`` that determine the result of tracing a model."""
_BATCH = 256


def estimated(args: Arguments, model: str, cluster: Cluster) -> tuple[Profile, str]:
    """Estimated profile of ``model`` on the devices of ``cluster``, and a sentence about it.

    A model traced before by the same versions is not traced again, which avoids importing torch. Stored in
    ``runs/estimates``, apart from measured profiles, also for `asa explain` and `asa simulate`.

    Raises:
        UsageError: the model cannot be built as requested.
        InvalidInputError: it fails, or the devices' data sheet is unknown.
    """
    key = _key(model, args)
    graph, fingerprint, on_one = (_remembered(model, key) if key else None) or _traced(model, args)
    profile = estimate(
        graph,
        cluster.device,
        model_spec=model,
        model_fingerprint=fingerprint,
        precision=args.precision,
        global_batch=args.global_batch or _BATCH,
        max_degree=cluster.num_devices,
        trained_on_one=on_one,
    )
    path = places.ESTIMATES / f"{slug(model)}.{key or 'own'}.{codec.fingerprint(profile)}.json"
    if not path.is_file():
        codec.save(profile, path)
    of = f"{model} (inputs of {'x'.join(map(str, graph.input_shape))})"
    said = f"times of {of} on {cluster.device.name} are estimated from FLOPs and bytes, uncalibrated"
    return profile, said + _without(args)


def _without(args: Arguments) -> str:
    """Options that no estimate counts, in words; empty without them."""
    ways = [(n, getattr(args, n, None)) for n in ("memory_format", "compile")]
    names = [f"--{n.replace('_', '-')} {way}" for n, way in ways if way not in (None, "none", "contiguous")]
    return f"; {' and '.join(names)} counts only where a profile was measured with it" if names else ""


def _traced(model: str, args: Arguments) -> tuple[LayerGraph, str, bool]:
    """The structure, its fingerprint, and whether the model can train on a batch of one sample."""
    from asa.sharding.layers.structure import structure_of
    from asa.zoo.inputs import example
    from asa.zoo.models import build, default_input
    from asa.zoo.without_values import on_meta

    shape, classes = default_input(model, input_shape(args), args.classes)
    make = partial(build, model, num_classes=classes, input_shape=shape)
    structure = structure_of(
        partial(on_meta, make), make, example(shape), name=model, num_classes=classes, precision=args.precision
    )
    return structure.graph, structure.fingerprint, structure.trains_on_one


def _remembered(model: str, key: str) -> tuple[LayerGraph, str, bool] | None:
    """Result of an earlier trace of the same model; None if there is none."""
    for path in sorted(places.ESTIMATES.glob(f"{slug(model)}.{key}.*.json")):
        try:
            profile = codec.load(Profile, path)
        except InvalidInputError:
            continue
        if profile.model_spec == model:
            return profile.graph, profile.model_fingerprint, trained_on_one(profile)
    return None


def _key(model: str, args: Arguments) -> str:
    """Key of everything that determines the result of a trace; empty if that includes code or configuration of the
    user."""
    origin, colon, name = model.partition(":")
    if colon and model not in SHAPES and (origin not in PACKAGES or "/" in name or Path(name).exists()):
        return ""
    digest = hashlib.sha256(repr((model, input_shape(args), args.classes, args.precision)).encode())
    for package in ("torch", PACKAGES.get(origin, "torchvision")):
        digest.update(_version(package).encode() + b"\0")
    for room in _ROOMS:
        for path in sorted((Path(asa.__file__).parent / room).rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def traced_before(model: str, args: Arguments) -> bool:
    """Whether an estimate needs no trace, because the same model was traced before by the same versions."""
    key = _key(model, args)
    return bool(key) and _remembered(model, key) is not None
