"""Locations of files.

Profiles and measured clusters: ``profiles/`` of the working directory, then those shipped with the package. Plans:
``runs/plans/``. Runs: ``runs/train/``, comparisons: ``runs/bench/``. If nothing is named, the newest is used.
"""

from __future__ import annotations

import fcntl
import filecmp
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from asa.cli.console import Console
from asa.errors import InvalidInputError, UnavailableError, UsageError, lacking
from asa.ir import codec, shipped
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.staleness import Staleness
from asa.profiler.paths import slug
from asa.reading import open_regular, read_bytes

T = TypeVar("T")

PROFILES = Path("profiles")
PLANS = Path("runs/plans")
TRAINING = Path("runs/train")
COMPARISONS = Path("runs/bench")
ESTIMATES = Path("runs/estimates")
CORRECTED = Path("runs/corrected")
ORIGINS = Path("runs/plans/origins")
"""Profiles and clusters of plans, by fingerprint, since a profile may be measured anew, or a cluster's file may be
moved."""

CLUSTER_PREFIX = "cluster."
STALENESS_SUFFIX = ".staleness.json"

SHIPPED = shipped.FOLDER
"""Profiles and clusters that are shipped with the package."""


def shown(path: Path) -> str:
    """A path as shown to people; files of the package are shown by name."""
    return f"{path.name} (shipped)" if path.is_absolute() else str(path)


def looks_like_file(text: str) -> bool:
    """Whether ``text`` means a file, and not a model (``hf:owner/name``), a preset or a strategy.

    >>> looks_like_file("./resnet50.json"), looks_like_file("hf:owner/name"), looks_like_file("resnet50")
    (True, False, False)
    """
    return text.endswith(".json") or ("/" in text and ":" not in text) or Path(text).is_file()


def profiles(console: Console) -> list[tuple[Path, Profile]]:
    """All readable profiles, newest first by their own date, and after them those that are shipped with the package;
    unreadable ones are named on stderr."""
    files = _files(lambda p: not p.name.startswith(CLUSTER_PREFIX) and not p.name.endswith(STALENESS_SUFFIX))
    readable = list(_readable(files, Profile, console))
    newest_first = sorted(readable, key=lambda item: item[1].provenance.created, reverse=True)
    return sorted(newest_first, key=lambda item: SHIPPED in item[0].parents)


def own_profiles(console: Console) -> list[tuple[Path, Profile]]:
    """:func:`profiles` without those that are shipped with the package."""
    return [(path, profile) for path, profile in profiles(console) if SHIPPED not in path.parents]


def staleness_path(profile: Path, optimizer: str, workers: int) -> Path:
    """Path of the staleness curves for a profile's model, beside the profile.

    >>> str(staleness_path(Path("profiles/cnn.cpu.fp32.json"), "sgd", 4))
    'profiles/cnn.cpu.fp32.sgd-4.staleness.json'
    """
    return profile.with_name(f"{profile.stem}.{optimizer}-{workers}{STALENESS_SUFFIX}")


def staleness(console: Console, profile: Path | None = None) -> list[tuple[Path, Staleness]]:
    """All readable files of staleness curves, including those beside ``profile``, newest first by their own date."""
    adjacent = [] if profile is None else sorted(profile.parent.glob(f"*{STALENESS_SUFFIX}"))
    files = [*adjacent, *(p for p in _files(lambda p: p.name.endswith(STALENESS_SUFFIX)) if p not in adjacent)]
    readable = list(_readable(files, Staleness, console))
    return sorted(readable, key=lambda item: item[1].created, reverse=True)


def estimates(console: Console) -> list[Profile]:
    """All readable profiles that were estimated for a plan and never measured."""
    return [p for _, p in _readable(sorted(ESTIMATES.glob("*.json")), Profile, console)]


def corrected(cls: type[T], console: Console) -> list[T]:
    """All readable profiles or clusters that runs have corrected and plans were made from."""
    return [x for _, x in _readable(sorted(CORRECTED.glob(f"*.{cls.__name__.lower()}.json")), cls, console)]


def clusters(console: Console) -> list[tuple[Path, Cluster]]:
    """All readable measured clusters, those of the working directory first, newest first."""
    return list(_readable(_files(lambda p: p.name.startswith(CLUSTER_PREFIX)), Cluster, console))


def path_for(path: Path, profile: Profile) -> Path:
    """Path for ``profile``: ``path``, or another one if that holds a profile for other inputs or classes."""
    try:
        stored = codec.load(Profile, path).graph
    except InvalidInputError:
        return path
    shape, classes = profile.graph.input_shape, profile.graph.num_classes
    if (stored.input_shape, stored.num_classes) == (shape, classes):
        return path
    model, rest = path.name.split(".", 1)
    return path.with_name(f"{model}.{'x'.join(map(str, shape))}-{classes}.{rest}")


def cluster_path(cluster: Cluster) -> Path:
    """Path of a measured cluster."""
    return PROFILES / f"{CLUSTER_PREFIX}{slug(cluster.name)}.json"


def plan_path(plan: Plan) -> Path:
    """Default path of a plan."""
    return PLANS / f"{slug(plan.model_spec)}.{slug(plan.cluster)}.{plan.gpus}.json"


def keep_origins(*made_from: Profile | Cluster) -> None:
    """Store the profile and cluster of a plan, for explaining it, running it elsewhere, or planning again."""
    for noun in made_from:
        path, text = ORIGINS / f"{codec.fingerprint(noun)}.json", codec.dumps(noun)
        try:
            stored = read_bytes(path) == text.encode()
        except InvalidInputError:
            stored = False
        if not stored:  # there is none, or it was damaged
            codec.write(text, path)


def origin(cls: type[T], fingerprint: str) -> list[T]:
    """The stored profile or cluster with that fingerprint, as a list of one; empty if it is missing or unreadable."""
    try:
        return [codec.load(cls, ORIGINS / f"{fingerprint}.json")]
    except InvalidInputError:
        return []


def new_folder(parent: Path, name: str) -> Path:
    """Path for the folder of a new run (not created): the name and the time, with a number if that is taken."""
    path = parent / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    numbered = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    return path if not path.exists() else next(p for p in numbered if not p.exists())


@contextmanager
def keeping(console: Console, *paths: Path) -> Iterator[None]:
    """Context that writes files to ``paths``. A file that was there with other contents is kept beside the new one, as
    ``FILE.~1~``, and a line says so."""
    earlier = {}
    for path in paths:
        target = Path(os.path.realpath(path))
        if target.is_file():
            kept = next(p for n in itertools.count(1) if not (p := target.with_name(f"{target.name}.~{n}~")).exists())
            try:
                os.link(target, kept)  # files are replaced, never written into
            except OSError:
                shutil.copy2(target, kept)
            earlier[path] = kept
    try:
        yield
    finally:
        for path, kept in earlier.items():
            if path.is_file() and filecmp.cmp(path, kept, shallow=False):
                kept.unlink()
            else:
                console.say(f"asa: {path} existed; what it contained is now in {path.with_name(kept.name)}")


def keeping_page(console: Console, folder: str) -> AbstractContextManager[None]:
    """Context that writes a page of ``--report`` to ``folder``: an earlier page and its plan are kept
    (:func:`keeping`). Pages contain their figures."""
    return keeping(console, Path(folder) / "report.html", Path(folder) / "plan.json")


def save_plan(plan: Plan, path: Path, console: Console) -> None:
    """Write ``plan`` to ``path``. Another plan that was there is kept (:func:`keeping`); the same one, found anew, is
    not."""
    with suppress(InvalidInputError):
        earlier = codec.load(Plan, path)
        if replace(earlier, certificate=plan.certificate) == plan:
            codec.save(plan, path)
            return
    with keeping(console, path):
        codec.save(plan, path)


RESULTS = {"bench.json": "a comparison", "study.json": "a study", "log.jsonl": "a run"}
"""Files by which the folder of earlier results is known."""


def check_no_results(folder: Path, flag: str) -> None:
    """Check that ``folder`` contains no earlier results, whose files would be mixed with the new ones.

    Raises:
        UsageError: it does; ``flag`` is the option that sets another folder.
    """
    for name, what in RESULTS.items():
        if (folder / name).exists():
            raise UsageError(f"{folder} contains {what} ({name}); choose another {flag}, or move it away")


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Context in which no other process takes ``folder`` for its results. It is created if necessary, and removed if it
    stays empty.

    Raises:
        UsageError: another process is writing its results there.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(f"another process is writing its results to {folder}; choose another --out") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def check_writable(path: Path, flag: str) -> None:
    """Check that a file can be written to ``path``, before minutes of work go into it.

    Raises:
        UnavailableError: it cannot; ``flag`` is the option that sets another path.
    """
    folder = next(p for p in (path.parent, *path.parent.parents) if p.exists() or p == p.parent)
    if codec.is_special(path):
        if os.access(path, os.W_OK):
            return
        reason = "no permission to write to it"
    elif path.is_dir():
        reason = "it is a directory"
    elif not folder.is_dir():
        reason = f"{folder} is not a directory"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"no permission to write in {folder}"
    else:
        try:  # only writing shows a full disk, or a file system such as /proc
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"\0" * 4096)
            return
        except OSError as error:
            reason = f"{error.strerror or error} in {folder}"
    raise UnavailableError(f"cannot write {path}: {reason}; choose another {flag}")


def check_report(folder: str | None, run: Path | None = None) -> None:
    """Check that ``--report`` can write its page and figures to ``folder`` (None: there is no such option), before
    minutes of work go into what it shows. ``run``: the folder of the run that it shows, which may have the page.

    Raises:
        UnavailableError: it cannot, or the package that draws is missing.
        UsageError: the folder contains results, whose plan or page would be replaced.
    """
    if folder is None:
        return
    if run is None or not Path(folder).exists() or not os.path.samefile(folder, run):
        check_no_results(Path(folder), "--report")
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(lacking("matplotlib", "--report"))
    check_writable(Path(folder) / "report.html", "--report")


def check_unused(folder: Path) -> None:
    """Check that a new run can go into ``folder``.

    Raises:
        UsageError: it contains results. A run that ended before its first epoch is none: it is begun again.
    """
    steps = sorted(p.name for p in (folder / "checkpoints").glob("step_*"))
    if steps:
        raise UsageError(f"{folder} contains a run, up to {steps[-1]}; --resume continues it, or choose another --out")
    log = folder / "log.jsonl"
    if not log.is_file() or '"event": "epoch"' in log.read_text(errors="replace"):
        check_no_results(folder, "--out")


def check_free(folder: Path) -> None:
    """Check that no run is at work in ``folder``, before the slow import of torch. A run checks it once more.

    Raises:
        UsageError: one is.
    """
    try:
        with open_regular(folder / "lock") as stream:
            owner = stream.read(20).decode(errors="replace").strip()
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{folder} is in use by another run (process {owner}); choose another --out") from None
    except (OSError, InvalidInputError):
        pass  # no lock, or a file system without locks


def newest_plan(text: str | None) -> tuple[Path, Plan]:
    """The plan at ``text``, or the newest one in ``runs/plans``.

    Raises:
        InvalidInputError: there is none, or it cannot be used.
    """
    if text is not None:
        path = Path(text)
    else:
        plans = _newest_first(PLANS.glob("*.json"))
        if not plans:
            raise InvalidInputError(f"no plan in {PLANS}/; make one with `asa plan`, or name a plan file")
        path = plans[0]
    return path, codec.load(Plan, path)


def newest_runs() -> list[Path]:
    """Folders of the runs in ``runs/train`` that have a plan, newest plan first."""
    return [path.parent for path in _newest_first(TRAINING.glob("*/plan.json"))]


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """The existing files among ``paths``, by the time of their last change."""
    return sorted((p for p in paths if p.exists()), key=lambda p: p.stat().st_mtime, reverse=True)


def _files(accept: Callable[[Path], bool]) -> list[Path]:
    paths: list[Path] = []
    for folder in (PROFILES, SHIPPED):
        files = [p for p in folder.glob("*.json") if accept(p) and p.exists()]
        paths += sorted(files, key=lambda p: (-p.stat().st_mtime, p.name))
    return shipped.each_once(paths)


def _readable(paths: list[Path], cls: type[T], console: Console) -> Iterator[tuple[Path, T]]:
    for path in paths:
        try:
            yield path, codec.load(cls, path)
        except InvalidInputError as error:
            console.say(f"asa: passed over: {error}")
