"""Choice of the profile and the cluster for a command, if the user has not named a file."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asa.cli import places
from asa.cli.console import Console
from asa.cli.estimates import estimated
from asa.cli.options import check_model, input_shape
from asa.cli.verb import Arguments
from asa.errors import InvalidInputError, UnavailableError, UsageError, lacking
from asa.ir import codec, units
from asa.ir.chips import other_gpu
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import DeviceRecord, Profile
from asa.launch import cuda_devices
from asa.launch.devices import cpu_name
from asa.profiler.paths import slug
from asa.reading import kind_at
from asa.zoo.names import REMARKS

PROFILE_LIMIT_S = 75.0
OLD_S = 3600.0
"""Age in seconds from which on a stored profile is compared with this machine before something is run by it."""
OTHER_SPEED = 1.4
"""Ratio of speeds beyond which it is measured anew. Virtual machines of one name were up to 2.7 times as slow as that
of a shipped profile; a busy core slows its neighbour down by 1.25."""

_SAME = 2e-6
"""Relative difference up to which two computations of a step time count as equal."""


def named_cluster(name: str, gpus: int | None = None) -> Cluster:
    """A cluster file, a measured cluster by its name, or a preset; for ``gpus`` devices.

    Raises:
        InvalidInputError: a file that cannot be used.
        UsageError: no preset of that name.
    """
    from asa.cost.machine import presets

    if places.looks_like_file(name):
        return codec.load(Cluster, Path(name))
    if name not in presets.names() and (kind := kind_at(name)):
        raise InvalidInputError(f"cannot use {name}: it is {kind}; name a cluster file or a preset")
    for folder in (places.PROFILES, places.SHIPPED):
        local = folder / f"{places.CLUSTER_PREFIX}{slug(name)}.json"
        if local.is_file():
            return codec.load(Cluster, local)
    return presets.load(name, gpus)


def wide_enough(cluster: Cluster, gpus: int | None, console: Console) -> Cluster:
    """``cluster``, extended by nodes of the same kind if ``gpus`` needs more devices; prints a note about that."""
    from asa.cost.machine import widen

    if gpus is None or len(cluster.levels) < 2 or not widen.possible(cluster, gpus):
        return cluster
    console.say(f"asa: {widen.note(cluster, gpus)}")
    return widen.widened(cluster, gpus)


def default_cluster(console: Console, device: DeviceRecord, gpus: int | None) -> Cluster:
    """The stored cluster that fits best; see :func:`asa.cost.machine.nearest.nearest`."""
    from asa.cost.machine.nearest import nearest

    return nearest([c for _, c in places.clusters(console)], device, gpus)


def note_similar_name(args: Arguments, console: Console, model: str | None) -> None:
    """Say what ``model`` is if its name may be mistaken for that of another, unless the size of the input is given."""
    if model in REMARKS and not args.input:
        console.say(f"asa: {REMARKS[model]}")


def torch_version_note(p: Profile) -> str:
    """A sentence on a profile that was measured with another version of torch than the installed one; empty if it was
    not, or if this machine has no such devices."""
    measured_with = p.provenance.torch_version.partition("+")[0]
    if p.provenance.origin != "measured" or (p.device.type == "cuda" and not cuda_devices()):
        return ""
    try:
        installed = version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""
    releases = [text.split(".")[:2] for text in (measured_with, installed)]
    if releases[0] == releases[1] or len(releases[0]) < 2:
        return ""
    return (
        f"times of {p.model_spec} are of torch {measured_with}, installed is {installed}; `asa profile "
        f"{p.model_spec}` measures them anew"
    )


def guessed_updates_note(p: Profile, cluster: Cluster) -> str:
    """A sentence on optimizer steps of a GPU that are priced by the memory of a processor, because neither ``p`` nor
    ``cluster`` says more; empty if one does."""
    device = cluster.device
    if p.updates or device.type == "cpu" or device.memory_bandwidth > 0:
        return ""
    return (
        f"neither the profile nor the cluster says how fast {device.name} updates weights: a processor core is "
        f"assumed, far too slow; state its memory_bandwidth in cluster {cluster.name}"
    )


def processor_note(p: Profile) -> str:
    """A sentence on a profile that was measured on another processor than this machine's; empty if it was not."""
    here = cpu_name()
    if p.device.type != "cpu" or p.device.name == here:
        return ""
    return f"times are of {p.device.name}, this machine has {here}; `asa profile {p.model_spec}` measures them here"


def profile(
    args: Arguments,
    console: Console,
    model: str | None,
    cluster: Cluster | None,
    admit: Callable[[Cluster], None],
) -> tuple[Profile, str]:
    """The profile to plan with, and a sentence about it: from a file, the newest that fits, measured now, or an
    estimate if the devices are elsewhere.

    Before anything is measured, ``admit`` is called with the cluster to plan for, and raises if no plan could be made
    or run.

    Raises:
        InvalidInputError: no profile, or one that cannot be used.
        UsageError: a profile was named together with options that contradict it.
        UnavailableError: a GPU is needed to measure, and there is none.
    """
    from asa.cost.machine.estimate import measured_on

    note_similar_name(args, console, model)
    if model is not None and places.looks_like_file(model):
        named = codec.load(Profile, Path(model))
        if not fits(named, args, None):
            raise UsageError(
                f"{model} is a profile {described(named)}; leave out --input, --tokens, --classes and --precision, or "
                f"profile {named.model_spec} with them"
            )
        return _for_cluster(named, cluster, f"profile {model}")
    every = places.profiles(console)
    any_way = _is_set(args, "compile")
    matches = [(path, p) for path, p in every if fits(p, args, model) and (any_way or p.runs_on(args.gpus))]
    for path, p in matches:
        if cluster is None or measured_on(p, cluster):
            better = fastest(p, matches)
            if better is None:
                return p, f"profile {places.shown(path)}{_others(p, matches)}"
            reason = f"{better[1].execution or 'plain'}, measured {p.step_s / better[1].step_s:.2f} times as fast"
            return better[1], f"profile {places.shown(better[0])}: {reason} as {p.execution or 'plain'}"
    if matches:
        path, p = matches[0]
        return _for_cluster(p, cluster, f"profile {places.shown(path)}")
    if model is None and every:
        raise InvalidInputError(
            f"none of {len(every)} profiles is of the --input, --tokens, --classes and --precision asked for, the "
            f"newest is {described(every[0][1])}; name a model to profile it so"
        )
    if model is None:
        raise InvalidInputError(
            f"no profile in {places.PROFILES}/; run `asa profile MODEL` first, or name a model: `asa plan MODEL`"
        )
    check_model(args, model)
    if importlib.util.find_spec("torch") is None:
        known_models = ", ".join(sorted({p.model_spec for _, p in every}))
        raise UnavailableError(f"{lacking('torch', f'examining {model}')}; there are profiles of {known_models}")
    if cluster is None or _has_local_devices(cluster):
        device = local_device(cluster.device.type if cluster else "auto")
        admit(cluster or default_cluster(console, device, args.gpus))
        return measured(args, console, model, device.type)
    return estimated(args, model, cluster)


def _has_local_devices(cluster: Cluster) -> bool:
    """Whether this machine has devices like those of ``cluster``, on which a model can be measured for it."""
    if cluster.device.type == "cpu":
        return True
    return bool(cuda_devices()) and not other_gpu(local_device("cuda").name, cluster.device.name)


def local_device(kind: str) -> DeviceRecord:
    """Description of the device on which a measurement would run."""
    from asa.profiler.machine import choose_device, device_record

    return device_record(choose_device(kind))


USUAL_BATCH = {"cuda": 256, "cpu": 64}
"""Global batch of a new profile, by kind of device."""


def local_batch(args: Arguments, console: Console, model: str, device: str, gpus: int) -> int:
    """The global batch that :func:`local_profile` will plan for, before anything is measured."""
    stored = None if args.global_batch else stored_local_profile(args, console, model, device, gpus)
    return args.global_batch or (USUAL_BATCH[device] if stored is None else stored[0].global_batch)


def local_profile(
    args: Arguments, console: Console, model: str, device: str, gpus: int, *, limit_s: float = PROFILE_LIMIT_S
) -> tuple[Profile, str]:
    """A profile for this device, up to the requested batch (at the model's own input size by default): the newest
    stored one, or a new measurement if there is none, or this machine has become slower or faster since."""
    stored = stored_local_profile(args, console, model, device, gpus)
    if stored is not None:
        from asa.profiler.measure import slowdown

        ratio = slowdown(stored[0]) if _is_old(stored[0]) else 1.0
        if 1 / OTHER_SPEED <= ratio <= OTHER_SPEED:
            if said := torch_version_note(stored[0]):
                console.say(f"asa: {said}")
            return stored
        console.say(f"asa: {stored[1]}: a step takes {ratio:.2g} times as long here now, so {model} is profiled anew")
    return measured(args, console, model, device, limit_s=limit_s, max_degree=max(8, gpus))


def _is_old(p: Profile) -> bool:
    """Whether this machine may have another speed by now than when ``p`` was measured."""
    try:
        return time.time() - datetime.fromisoformat(p.provenance.created).timestamp() > OLD_S
    except (ValueError, OverflowError):  # a file by hand
        return True


def stored_local_profile(
    args: Arguments, console: Console, model: str, device: str, gpus: int
) -> tuple[Profile, str] | None:
    """The newest fitting profile measured on this device that is right for ``gpus`` of them, and a sentence about it;
    None if there is none."""
    from asa.zoo.models import default_input

    name = local_device(device).name
    shape, _ = default_input(model, input_shape(args), args.classes)
    for path, p in places.profiles(console):
        is_local = p.device.name == name and p.graph.input_shape == shape and p.runs_on(gpus)
        if is_local and fits(p, args, model) and p.global_batch >= (args.global_batch or 1):
            return p, f"profile {places.shown(path)}"
    return None


def measured(
    args: Arguments,
    console: Console,
    model: str,
    device: str,
    *,
    limit_s: float = PROFILE_LIMIT_S,
    max_degree: int = 8,
    output: Path | None = None,
) -> tuple[Profile, str]:
    """Profile ``model`` now, and store the profile in ``profiles/`` or at ``output``; returns it with a sentence about
    it."""
    from asa.profiler.machine import choose_device
    from asa.profiler.measure import profile_model
    from asa.profiler.paths import profile_path
    from asa.zoo.models import default_input

    places.check_writable(output or places.PROFILES / "profile.json", "-o" if output else "folder to work in")
    shape, classes = default_input(model, input_shape(args), args.classes)
    chosen = choose_device(device).type
    with console.progress(f"profiling {model}") as report:
        new = profile_model(
            model,
            input_shape=shape,
            num_classes=classes,
            global_batch=args.global_batch or USUAL_BATCH[chosen],
            device=chosen,
            precision=args.precision,
            memory_format=getattr(args, "memory_format", None) or "contiguous",
            compiled=getattr(args, "compile", None) or "none",
            time_limit_s=limit_s,
            max_tensor_degree=max_degree,
            progress=report,
        )
    path = output or places.path_for(profile_path(new, places.PROFILES), new)
    with places.keeping(console, path):
        codec.save(new, path)
    return new, f"profile {path}, measured now"


def origins(plan: Plan, console: Console, args: Arguments | None = None) -> tuple[Profile, Cluster]:
    """The profile and the cluster from which a plan was made: as named, or identified by their fingerprints.

    ``args``: of a command with ``--profile`` and ``--cluster``.

    Raises:
        InvalidInputError: they no longer exist, or the plan was made from others than the named ones.
    """
    profile_file, cluster_name = (None, None) if args is None else (args.profile, args.cluster)
    remedy = "put it there" if args is None else "name it with {}"
    if profile_file is not None:
        profiles = [codec.load(Profile, Path(profile_file))]
    else:
        profiles = places.origin(Profile, plan.profile_fingerprint)
        profiles = profiles or [p for _, p in places.profiles(console)] + places.estimates(console)
        profiles += places.corrected(Profile, console)
    base = next((p for p in profiles if codec.fingerprint(p) == plan.profile_fingerprint), None)
    if base is None and profile_file is not None:
        raise InvalidInputError(
            f"{profile_file} ({codec.fingerprint(profiles[0])}) is not the profile the plan was made from "
            f"({plan.profile_fingerprint}); name that one, or plan again"
        )
    if base is None:
        raise InvalidInputError(
            f"the profile the plan was made from ({plan.profile_fingerprint}) is not in {places.PROFILES}/; "
            f"{remedy.format('--profile')}, or plan again"
        )
    from asa.cost.machine import presets, widen

    if cluster_name is not None:
        clusters = [named_cluster(cluster_name)]
    else:
        clusters = places.origin(Cluster, plan.cluster_fingerprint) + [c for _, c in places.clusters(console)]
        clusters += places.corrected(Cluster, console)
        clusters += [presets.load(n) for n in presets.names() if plan.cluster.partition(widen.AS)[0] == n]
    clusters += [widen.widened(c, plan.gpus) for c in clusters if widen.possible(c, plan.gpus)]
    for cluster in clusters:
        if codec.fingerprint(cluster) == plan.cluster_fingerprint:
            return base, cluster
    if cluster_name is not None:
        raise InvalidInputError(
            f"{cluster_name} ({codec.fingerprint(clusters[0])}) is not the cluster the plan was made for "
            f"({plan.cluster}, {plan.cluster_fingerprint}); name that one, or plan again with --cluster {cluster_name}"
        )
    raise InvalidInputError(
        f"the cluster the plan was made for ({plan.cluster}, {plan.cluster_fingerprint}) is not in {places.PROFILES}/; "
        f"{remedy.format('--cluster')}, or plan again"
    )


def discipline_note(plan: Plan) -> str:
    """A line on the times that are shown of a plan whose workers do not take every step together."""
    inside = "a group's step" if plan.groups > 1 else "a step of its workers"
    return f"asa: {plan.consistency}: this is {inside} as if they waited for one another, without servers and meetings"


def numbers_note(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    """A line on a plan whose step time is not what its profile and cluster give, or whose gap is not that between its
    step time and its bound; empty for others."""
    from asa.planner import verify
    from asa.strategies import offered

    stated, proof = plan.prediction.step_time_s, plan.certificate
    if plan.consistency is not None or not stated:
        return ""
    found = verify(plan, profile, cluster, offered()).step_time_s
    if abs(stated - found) > _SAME * found:
        what = f"{units.seconds(stated)} a step, its profile and cluster give {units.seconds(found)}"
    elif abs(1 - proof.lower_bound_s / stated - proof.gap) > _SAME:
        bound = units.seconds(proof.lower_bound_s)
        what = f"{units.seconds(stated)} a step, a bound of {bound}, and a gap of {proof.gap:.4g}, which do not fit"
    else:
        return ""
    return f"asa: the plan states {what}: it was edited, or made by another version of asa; plan again for a proof"


def fits(p: Profile, args: Arguments, model: str | None) -> bool:
    """Whether a profile satisfies all given options; options that were not given do not count."""
    return (
        (model is None or p.model_spec == model)
        and (input_shape(args) is None or p.graph.input_shape == input_shape(args))
        and (args.classes is None or p.graph.num_classes == args.classes)
        and (not args.given("precision") or p.precision == args.precision)
        and (not _is_set(args, "memory_format") or p.memory_format == args.memory_format)
        and (not _is_set(args, "compile") or p.compiled == args.compile)
    )


def _is_set(args: Arguments, name: str) -> bool:
    """Whether the command has the option ``name``, and it was set."""
    return hasattr(args, name) and args.given(name)


def fastest(first: Profile, others: list[tuple[Path, Profile]]) -> tuple[Path, Profile] | None:
    """The profile of the same model and device as ``first``, computed in another way, with the fastest measured step;
    None if ``first`` itself is the fastest. For each way, the newest profile counts."""
    ways: dict[str, tuple[Path, Profile]] = {}
    for path, p in others:
        same = all(getattr(p, what) == getattr(first, what) for what in ("model_fingerprint", "device", "precision"))
        if same and p.global_batch == first.global_batch and p.provenance.trusted == first.provenance.trusted:
            ways.setdefault(p.execution, (path, p))
    best = min(ways.values(), key=lambda entry: entry[1].step_s, default=None)
    return None if best is None or best[1] is first or best[1].step_s >= first.step_s else best


def _others(chosen: Profile, profiles: list[tuple[Path, Profile]]) -> str:
    """What distinguishes the newest profile from others of the same model, of other inputs, classes or precision."""
    own_key = (chosen.graph.input_shape, chosen.graph.num_classes, chosen.precision)
    others = {
        (p.graph.input_shape, p.graph.num_classes, p.precision)
        for _, p in profiles
        if p.model_spec == chosen.model_spec and p.device.type == chosen.device.type
    } - {own_key}
    if not others:
        return ""
    shape, classes, precision = min(others)
    option = "--tokens" if len(shape) == 1 else "--input"
    hint = f"--precision {precision}" if classes == own_key[1] else f"--classes {classes}"
    if shape != own_key[0]:
        hint = f"{option} {'x'.join(map(str, shape))}"
    return f", the newest of {chosen.model_spec}: {described(chosen).partition(' at ')[2]}; {hint} takes another"


def described(p: Profile) -> str:
    size = "x".join(map(str, p.graph.input_shape))
    return (
        f"of {p.model_spec} at {size}, {p.graph.num_classes} classes, {p.precision}{p.execution and f', {p.execution}'}"
    )


def _for_cluster(p: Profile, cluster: Cluster | None, text: str) -> tuple[Profile, str]:
    """``p`` with its sentence, extended by a warning if it was measured on other devices and must be converted."""
    from asa.cost.machine.estimate import measured_on

    if cluster is None or measured_on(p, cluster):
        return p, text
    return p, f"{text} was taken on {p.device.name}; times on {cluster.device.name} are estimated from it, uncalibrated"
