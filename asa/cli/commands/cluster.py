"""``asa cluster``: lists, shows and measures clusters of devices and links."""

from __future__ import annotations

import time
from pathlib import Path

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.ir import codec

_NOTABLY_LONGER = 1.5


def run_list(_: Arguments, console: Console) -> None:
    """List measured clusters, then presets."""
    from asa.cost.machine import presets
    from asa.report.text import cluster as report

    clusters = [(places.shown(path), c) for path, c in places.clusters(console)]
    clusters += [("preset", presets.load(name)) for name in presets.names()]
    rows = [
        {
            "name": c.name,
            "from": origin,
            "device": c.device.name,
            "device_type": c.device.type,
            "num_devices": c.num_devices,
            "backend": c.backend,
            "status": c.status,
            "source": c.source,
        }
        for origin, c in clusters
    ]
    data = {"kind": "clusters", "clusters": rows}
    console.result(data, lambda: [report.overview(clusters), report.legend(clusters)])


def run_show(args: Arguments, console: Console) -> None:
    """Show one cluster in full."""
    from asa.cli.choose import named_cluster
    from asa.report.text import cluster as report

    cluster = named_cluster(args.cluster)
    console.result(codec.document(cluster), lambda: report.render(cluster))


def run_measure(args: Arguments, console: Console) -> None:
    """Measure collectives between this machine's ranks, store and show the cluster."""
    from asa.cli.bench_setup import device_of
    from asa.launch import usable_cores
    from asa.profiler.interconnect import measure_cluster
    from asa.report.text import cluster as report

    places.check_writable(Path(args.output) if args.output else places.PROFILES / "cluster.json", "-o")
    device, ranks = device_of(args)
    on_cuda = device == "cuda"
    ranks = ranks if on_cuda or args.gpus else usable_cores()
    began = time.monotonic()
    with console.progress(f"measuring {ranks} ranks") as progress:
        cluster = measure_cluster(
            ranks,
            backend="nccl" if on_cuda else "gloo",
            time_limit_s=args.time_limit,
            name=args.name,
            progress=progress,
        )
    path = Path(args.output) if args.output else places.cluster_path(cluster)
    with places.keeping(console, path):
        codec.save(cluster, path)
    console.result(codec.document(cluster), lambda: report.render(cluster))
    spent_s = time.monotonic() - began
    if spent_s > _NOTABLY_LONGER * args.time_limit:
        console.say(
            f"asa: this took {spent_s:.0f} s, not {args.time_limit:g}: every figure is taken three times at least, and "
            "other processes count"
        )
    console.say(f"asa: wrote {path}")


VERBS = (
    Verb(name="cluster list", help="list measured clusters and presets", run=run_list, options=(o.JSON,)),
    Verb(
        name="cluster show",
        help="show devices, links and bandwidths of one cluster, in the columns of nccl-tests",
        run=run_show,
        options=(
            Option(
                name="cluster",
                help="name from `asa cluster list`, or a file",
                positional=True,
                required=True,
                metavar="NAME|FILE",
            ),
            o.JSON,
        ),
    ),
    Verb(
        name="cluster measure",
        help="measure messages between the ranks of this machine",
        run=run_measure,
        options=(
            o.option(o.GPUS, help="number of ranks (default: all GPUs, or all cores)"),
            o.DEVICE,
            Option(name="name", help="name of the cluster (default: local-BACKEND-RANKS)", metavar="NAME"),
            o.span("time-limit", help="approximate time for measuring: 90s, 10m (default: 90s)", default=90.0),
            o.option(o.OUTPUT, help="file to write (default: profiles/cluster.NAME.json)"),
            o.JSON,
        ),
        details="The file goes to profiles/, where `asa plan` finds it.",
    ),
)
