"""``asa plan --from-run``: uses the profile and cluster that a run has corrected for the next plan."""

from __future__ import annotations

from pathlib import Path

from asa.cli import places
from asa.cli.console import Console
from asa.cli.replanning import CORRECTED_CLUSTER, CORRECTED_PROFILE
from asa.cli.verb import Arguments
from asa.errors import InvalidInputError, UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.reading import kind_at


def origins(args: Arguments, console: Console) -> tuple[Profile, Cluster]:
    """The corrected profile and cluster of the run in ``args.from_run``, stored as origins of plans. Options that
    ``args`` leave open (devices, batch, optimizer) are taken from the run's plan.

    Raises:
        UsageError: a model or a cluster is named too.
        InvalidInputError: the folder has no such files.
    """
    for name, shown in (("model", "a model or profile"), ("cluster", "--cluster")):
        if getattr(args, name) is not None:
            raise UsageError(f"--from-run has a profile and a cluster of its own; leave out {shown}")
    folder = Path(args.from_run)
    if not folder.is_dir():
        why = f"is {kind}, not a run's folder" if (kind := kind_at(folder)) else "does not exist"
        raise InvalidInputError(f"--from-run {folder} {why}; name one of {places.TRAINING}/")
    if not (folder / CORRECTED_PROFILE).is_file():
        raise InvalidInputError(
            f"{folder} has no {CORRECTED_PROFILE}: a run of `asa train` writes one after its first epoch, if the "
            "profile and the cluster of its plan are there"
        )
    profile = codec.load(Profile, folder / CORRECTED_PROFILE)
    cluster = codec.load(Cluster, folder / CORRECTED_CLUSTER)
    old = codec.load(Plan, folder / "plan.json")
    open_ = {"gpus": old.gpus, "global_batch": old.global_batch}
    args.replace(**{name: value for name, value in open_.items() if getattr(args, name) is None})
    if not args.given("optimizer"):
        args.replace(optimizer=old.optimizer)
    for value, kind in ((profile, "profile"), (cluster, "cluster")):
        codec.save(value, places.CORRECTED / f"{codec.fingerprint(value)}.{kind}.json")
    console.say(f"asa: profile and cluster as the run in {folder} has corrected them")
    slow = [d for d in cluster.devices or () if d.speed < 1]
    if slow:
        order = ", ".join(d.name for d in slow)
        console.say(f"asa: devices are listed the fastest first; the last ones are {order}: start ranks in that order")
    return profile, cluster
