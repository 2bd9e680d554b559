"""``asa train MODEL``: makes a plan for this machine before training, if a model is named instead of a plan file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asa.cli import bench_setup, choose, places
from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option
from asa.errors import UsageError
from asa.ir.optimizers import planned_as
from asa.ir.plan import Plan
from asa.launch.environments import is_launched
from asa.strategies import offered
from asa.zoo import specs

OPTIONS = (
    o.option(
        o.STRATEGIES, help="with MODEL: choose among these, or one method such as local_sgd:period=8 (default: all)"
    ),
    o.option(o.GLOBAL_BATCH, help="with MODEL: samples per optimizer step, over all ranks (default: the profile's)"),
    o.option(o.CLUSTER, help="with MODEL: name or file of a cluster (default: this machine)"),
    o.option(o.PRECISION, help="with MODEL: arithmetic of forward and backward"),
    o.option(o.INPUT, help="with MODEL: size of one image (default: the model's own, or a row of your table)"),
    o.option(o.TOKENS, help="with MODEL: tokens of one sequence (default: the model's own)"),
    o.option(o.CLASSES, help="with MODEL: number of classes (default: 100, or that of your own data)"),
)
_OF_A_MODEL = tuple(option.field for option in OPTIONS)


def names_a_model(args: Arguments) -> bool:
    """Whether a model is named, rather than the file of a plan.

    Raises:
        UsageError: options for planning are given together with a finished plan.
    """
    if args.plan is not None and not places.looks_like_file(args.plan) and not Path(args.plan).exists():
        if is_launched():  # each rank of a launcher would measure, and could get another plan
            raise UsageError(
                f"a launcher's ranks need a plan that is made: `asa plan {args.plan}` first, then its file"
            )
        return True
    flags = [f for f in _OF_A_MODEL if args.origin.get(f) == "flag"]
    if flags:
        which = args.plan or ("that of the run" if args.resume else f"the newest plan in {places.PLANS}")
        raise UsageError(
            f"--{flags[0].replace('_', '-')} decides what is planned, and {which} is planned already; name a MODEL in "
            "its place, or plan again"
        )
    return False


def words(args: Arguments, path: Path, options: Sequence[Option]) -> tuple[str, ...]:
    """Command words that train under the plan at ``path`` in the same way, without the options for planning.
    ``options`` are all of the command's."""
    rest: list[str] = []
    typed = iter(args.words)
    valued = {flag for o in options if not (o.positional or o.switch) for flag in (f"--{o.name}", o.short) if flag}
    of_planning = {f"--{option.name}" for option in OPTIONS}
    for word in typed:
        name, equals, _ = word.partition("=")
        value = [] if equals or name not in valued else [next(typed)]
        if name not in of_planning and word != args.plan:
            rest += [word, *value]
    return (str(path), *rest)


def _read(args: Arguments, console: Console, model: str, device: bench_setup.DeviceType, gpus: int) -> None:
    """Read data of the user's own, and check that ``model`` can learn them, before minutes of measuring: ranks that are
    forked have them then.

    Raises:
        UsageError, InvalidInputError, UnavailableError: they cannot be used.
    """
    if not specs.is_own(args.data):
        return
    import torch

    from asa.profiler.clock import one_thread
    from asa.zoo.models import default_input

    with one_thread(torch.device("cpu")):
        train = bench_setup.training_samples(args, console, model, args.classes)
        bench_setup.adopt_classes(args, console, model, train)
        classes = default_input(model, o.input_shape(args), args.classes)[1]
        batch = choose.local_batch(args, console, model, device, gpus)
        bench_setup.check_data(args, train, args.classes or classes, batch)


def planned(args: Arguments, console: Console) -> tuple[Path, Plan]:
    """Make a plan for the model ``args.plan`` on the available devices; returns it with the path of its file.

    Raises:
        UsageError, InfeasibleError: as in ``asa plan``.
    """
    model = args.plan
    o.check_model(args, model)
    choose.note_similar_name(args, console, model)
    from asa.planner import Request, check_request, plan, usual_limit

    device, gpus = bench_setup.device_of(args)
    draft = Request(gpus=gpus, global_batch=args.global_batch or 1, strategies=args.strategies)
    check_request(None, offered(), draft)
    _read(args, console, model, device, gpus)
    cluster = bench_setup.local_cluster(args, console, device, gpus)
    profile, source = choose.local_profile(args, console, model, device, gpus)
    console.say(f"asa: {source}")
    request = Request(
        gpus=gpus,
        global_batch=args.global_batch or profile.global_batch,
        strategies=args.strategies,
        optimizer=planned_as(args.optimizer or "sgd"),
        time_limit_s=usual_limit(gpus),
    )
    chosen = plan(profile, cluster, offered(), request)[0]
    path = places.plan_path(chosen)
    places.save_plan(chosen, path, console)
    places.keep_origins(profile, cluster)
    console.say(f"asa: {chosen.summary()}; wrote {path}")
    for note in chosen.notes if chosen.consistency is not None else ():
        console.say(f"asa: {note}")
    return path, chosen
