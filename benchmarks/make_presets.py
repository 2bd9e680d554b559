"""Make the cluster presets of ``asa/data/clusters`` from the public tables in ``../shared/truth/interconnects.json``.

    python benchmarks/make_presets.py [--truth DIR] [--out DIR]

A machine of which only the plateau was published gets a table from its plateau and the latency of the nearest
measured machine, and says so. Device peaks and memory are those of the vendors' data sheets (dense; what torch
reports as total memory, rounded down).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asa.cost.traffic.collectives import carried
from asa.ir import codec
from asa.ir.cluster import Cluster, CollectiveTable, Contention, Device, Level, Overlap, RankDevice, Status
from asa.ir.units import GIB

ROOT = Path(__file__).resolve().parent.parent
SIZES = tuple(1024 * 4**k for k in range(12))  # 1 KiB to 4 GiB
# "Compute 18.9 % slower on average" while collectives run beside it: the one published figure; links: none known.
OVERLAP = Overlap(compute_slowdown=1.189, communication_slowdown=1.0)


PCIE = {3: 15.754e9, 4: 31.508e9, 5: 63.015e9}
"""Bytes/s each way of 16 lanes, by generation (PCI-SIG); page-locked copies reach about four fifths of it."""
PCIE_EFFICIENCY = 0.8


def _device(
    name: str, gib: float, fp32: float, half: float, bandwidth: float, pcie: int, lanes: int = 16, products: float = 0.0
) -> Device:
    return Device(
        name=name,
        type="cuda",
        memory_bytes=int(gib * GIB),
        peak_fp32_flops=fp32 * 1e12,
        peak_bf16_flops=half * 1e12,
        memory_bandwidth=bandwidth * 1e9,
        host_bandwidth=round(PCIE_EFFICIENCY * PCIE[pcie] * lanes / 16, -8),
        product_share=products,
    )


# Name, memory GiB, dense TFLOP/s in fp32 and in bf16/fp16 (tensor cores), GB/s, PCIe generation (and lanes).
# ``products``: what remains of a published step after its memory traffic and communication. A100: 0.72 to 0.76, FSDP
# of Llama 2 and 3 on 64 (torchtitan, docs/performance.md) and 128 (foundation-model-stack/fms-fsdp). H100: 0.55,
# Llama 3 8B on 8 and 128 with slower memory (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). B200: 0.54, the
# mean of 21 steps of Llama 3 cut to some layers (benchmarks/truth/language.py).
A100 = _device("NVIDIA A100-SXM4-80GB", 79.0, 19.5, 312, 2039, 4, products=0.75)
V100 = _device("Tesla V100-SXM2-16GB", 15.7, 15.7, 125, 900, 3)
V100_32 = _device("Tesla V100-SXM2-32GB", 31.7, 15.7, 125, 900, 3)
H100 = _device("NVIDIA H100 80GB HBM3", 79.0, 66.9, 989, 3350, 5, products=0.55)
H100_PCIE = _device("NVIDIA H100 PCIe", 79.0, 51.2, 756, 2039, 5)
H200 = _device("NVIDIA H200", 139.0, 66.9, 989, 4800, 5)
B200 = _device("NVIDIA B200", 178.0, 80.0, 2250, 8000, 5, products=0.54)
RTX3070TI = _device("NVIDIA GeForce RTX 3070 Ti", 7.6, 21.7, 43.5, 608, 4)
RTX3090 = _device("NVIDIA GeForce RTX 3090", 23.6, 35.6, 71, 936, 4)
RTX4090 = _device("NVIDIA GeForce RTX 4090", 23.6, 82.6, 165, 1008, 4)
RTX5090 = _device("NVIDIA GeForce RTX 5090", 31.3, 104.8, 209, 1792, 5)
T4 = _device("Tesla T4", 14.6, 8.1, 65, 320, 3)
L4 = _device("NVIDIA L4", 22.0, 30.3, 121, 300, 4, 8)
A10G = _device("NVIDIA A10G", 22.1, 31.2, 70, 600, 4)


def plateau_status(status: Status) -> Status:
    """A table of which only the plateau was measured is no measured table."""
    return "measured-plateau-only" if status == "measured" else status


@dataclass(frozen=True)
class Tables:
    """Reads tables of one kind out of the truth file."""

    truth: dict[str, Any]

    def measured(self, key: str) -> CollectiveTable:
        """The points as published."""
        entry = self.truth[key]
        return CollectiveTable(
            op="all_reduce",
            ranks=entry["ranks"],
            points=tuple((int(size), us * 1e-6) for size, us, _ in sorted(entry["points"])),
            status=entry["status"],
            source=f"{key}: {entry['source']}",
        )

    def plateau(
        self, key: str, ranks: int, busbw: float, *, latency: str, status: Status | None = None
    ) -> CollectiveTable:
        """A table from a plateau in GB/s, with the latency of the machine ``latency``."""
        entry, alpha = self.truth[key], self.truth[latency]["alpha_us"] * 1e-6
        return CollectiveTable(
            op="all_reduce",
            ranks=ranks,
            points=tuple((size, alpha + carried("all_reduce", ranks) * size / (busbw * 1e9)) for size in SIZES),
            status=status or plateau_status(entry["status"]),
            source=f"{key}: {entry['source']}; latency estimated, that of {latency}",
        )

    def by_ranks(self, key: str, status: Status | None = None) -> list[CollectiveTable]:
        """One table per published group size, latencies as on A100s of as many ranks."""
        found = self.truth[key]["busbw_by_ranks"]
        return [
            self.plateau(key, int(n), bw, latency=f"a100-nvswitch-{n}", status=status)
            for n, bw in sorted(found.items(), key=lambda p: int(p[0]))
        ]


def _cluster(name: str, device: Device, levels: list[Level], note: str = "", per_host: int | None = None) -> Cluster:
    widest = levels[-1].tables[-1]
    return Cluster(
        name=name,
        backend="nccl",
        device=device,
        num_devices=levels[-1].devices,
        levels=tuple(levels),
        contention=(Contention(ranks=levels[-1].devices, slowdown=1.0),),
        overlap=OVERLAP,
        status=widest.status,
        source=f"{widest.source}; device: vendor's data sheet; host link: four fifths of its PCIe lanes, estimated"
        + (f"; {note}" if note else ""),
        devices_per_host=per_host,
    )


def _speed(device: Device, other: Device) -> float:
    """Of ``device`` where ``other`` has 1: the geometric mean of what data sheets say of half-precision arithmetic and
    of memory bandwidth. An estimate."""
    arithmetic = device.peak_bf16_flops / other.peak_bf16_flops
    return round(math.sqrt(arithmetic * device.memory_bandwidth / other.memory_bandwidth), 2)


def _unequal(name: str, devices: list[tuple[Device, int]], levels: list[Level]) -> Cluster:
    """A cluster of several kinds of devices, the fastest first, whose links are those of the slower kind."""
    best = devices[0][0]
    ranks = [d for d, count in devices for _ in range(count)]
    return replace(
        _cluster(name, best, levels, "speeds estimated, from half-precision peaks and memory bandwidth"),
        status="estimated",
        devices=tuple(RankDevice(name=d.name, speed=_speed(d, best), memory_bytes=d.memory_bytes) for d in ranks),
    )


def presets(truth: dict[str, Any]) -> list[Cluster]:
    """All presets."""
    t = Tables(truth)

    def level(name: str, devices: int, *tables: CollectiveTable) -> Level:
        return Level(name=name, devices=devices, tables=tables)

    def busbw(key: str) -> float:
        return float(truth[key]["busbw_inf"])

    def across(key: str, name: str, devices: int, bw: float, latency: str = "unspecified-4x8") -> Level:
        return level(name, devices, t.plateau(key, devices, bw, latency=latency))

    a100 = level("NVSwitch", 8, *(t.measured(f"a100-nvswitch-{n}") for n in range(2, 9)))
    v100 = level("NVLink mesh", 8, *(t.measured(f"v100-dgx1-{n}") for n in range(2, 9)))
    h200 = level("NVSwitch", 8, *t.by_ranks("h200-nvswitch-by-n"))
    smaller = [x for x in t.by_ranks("h200-nvswitch-by-n", status="derived") if x.ranks < 8]
    full = t.plateau("h100-nvswitch-8", 8, busbw("h100-nvswitch-8"), latency="a100-nvswitch-8")
    h100 = level("NVSwitch", 8, *smaller, full)
    b200 = level("NVSwitch", 8, t.measured("b200-nvswitch-8"))
    efa = truth["a100-p4d-efa400"]["busbw_1GiB_by_nodes"]
    roce = truth["a100-roce8x100-by-nodes"]["busbw_by_nodes"]

    def plateau(name: str, devices: int, key: str, latency: str) -> Level:
        return level(name, devices, t.plateau(key, devices, busbw(key), latency=latency))

    def outer(key: str, name: str, devices: int) -> Level:
        return across(key, name, devices, busbw(key))

    pair3070 = t.plateau("pcie-2x3070ti", 2, float(truth["pcie-2x3070ti"]["p2p_GBps"]), latency="v100-dgx1-2")
    found = [
        _cluster("a100-nvlink-8", A100, [a100]),
        _cluster("v100-dgx1-8", V100, [v100]),
        _cluster("h100-nvlink-8", H100, [h100], "groups below 8 are derived from H200"),
        _cluster("h200-nvlink-8", H200, [h200]),
        _cluster("b200-nvlink-8", B200, [b200]),
        _cluster("b200-4x8-efa", B200, [b200, level("EFA 8x50 GB/s", 32, t.measured("b200-4x8-efa8x50"))]),
        _cluster("h100-2x8-ib", H100, [h100, outer("h100-2x8-ib8x400", "InfiniBand 8x400", 16)]),
        _cluster("h100-4x8-ib", H100, [h100, outer("h100-4x8-ib8x400", "InfiniBand 8x400", 32)]),
        _cluster("a100-2x8-ib", A100, [a100, outer("a100-2x8-hdr4x200", "InfiniBand 4x200", 16)]),
        _cluster("a100-3x8-ib", A100, [a100, outer("a100-3x8-hdr4x200", "InfiniBand 4x200", 24)]),
        _cluster("a100-2x8-efa", A100, [a100, across("a100-p4d-efa400", "EFA 400", 16, efa["2"])]),
        _cluster("a100-4x8-efa", A100, [a100, across("a100-p4d-efa400", "EFA 400", 32, efa["4"])]),
        _cluster("a100-2x8-roce", A100, [a100, across("a100-roce8x100-by-nodes", "RoCE 8x100", 16, roce["2"])]),
        _cluster("a100-4x8-roce", A100, [a100, across("a100-roce8x100-by-nodes", "RoCE 8x100", 32, roce["4"])]),
        _cluster("v100-2x8-100g-tcp", V100_32, [v100, outer("ethernet-100g-tcp", "Ethernet 100G, TCP", 16)]),
        _cluster("v100-2x8-100g-rdma", V100_32, [v100, outer("ethernet-100g-rdma", "Ethernet 100G, RDMA", 16)]),
        _cluster("v100-2x8-25g-tcp", V100_32, [v100, outer("ethernet-25g-tcp", "Ethernet 25G, TCP", 16)]),
        _cluster("t4-8x1-25g-tcp", T4, [outer("ethernet-25g-tcp", "Ethernet 25G, TCP", 8)], per_host=1),
        _cluster("l4-8x1-25g-rdma", L4, [outer("ethernet-25g-rdma", "Ethernet 25G, RDMA", 8)], per_host=1),
        _cluster("a100-nvlink-2", A100, [plateau("NVLink 12", 2, "a100-pair-nv12", "a100-nvswitch-2")]),
        _cluster("h100-pcie-2", H100_PCIE, [plateau("NVLink bridge", 2, "h100pcie-pair-bridge", "a100-nvswitch-2")]),
        _cluster("4090-pcie-4", RTX4090, [plateau("PCIe 4, shared memory", 4, "pcie4-4090-4-shm", "v100-dgx1-4")]),
        _cluster(
            "4090-pcie-4-p2p",
            RTX4090,
            [plateau("PCIe 4, peer to peer", 4, "pcie4-4090-4-p2p", "v100-dgx1-4")],
            "patched driver",
        ),
        _cluster("5090-pcie-8", RTX5090, [level("PCIe 5", 8, *t.by_ranks("pcie5-5090"))]),
        _cluster(
            "3090-pcie-8",
            RTX3090,
            [level("PCIe 4, no peer to peer", 8, *t.by_ranks("pcie4-3090-noP2P-effective"))],
        ),
        _cluster("3070ti-pcie-2", RTX3070TI, [level("PCIe", 2, pair3070)]),
        _cluster("t4-pcie-4", T4, [plateau("PCIe 3", 4, "pcie-t4", "v100-dgx1-4")]),
        _cluster("l4-pcie-8", L4, [plateau("PCIe 4", 8, "pcie-l4", "v100-dgx1-8")]),
        _cluster("a10g-pcie-4", A10G, [plateau("PCIe 4", 4, "pcie-a10g", "v100-dgx1-4")]),
        _unequal(
            "a100-4-v100-4-100g-rdma",
            [(A100, 4), (V100, 4)],
            [
                level("NVLink", 4, *(t.measured(f"v100-dgx1-{n}") for n in range(2, 5))),
                outer("ethernet-100g-rdma", "Ethernet 100G, RDMA", 8),
            ],
        ),
        _unequal(
            "a100-8-v100-8-100g-rdma",
            [(A100, 8), (V100_32, 8)],
            [v100, outer("ethernet-100g-rdma", "Ethernet 100G, RDMA", 16)],
        ),
        _unequal(
            "4090-2-3090-2-pcie",
            [(RTX4090, 2), (RTX3090, 2)],
            [
                level(
                    "PCIe 4, no peer to peer", 4, *(x for x in t.by_ranks("pcie4-3090-noP2P-effective") if x.ranks <= 4)
                )
            ],
        ),
    ]
    assert len({c.name for c in found}) == len(found)
    return found


def main() -> None:
    """Write one file per preset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, default=ROOT.parent / "shared" / "truth")
    parser.add_argument("--out", type=Path, default=ROOT / "asa" / "data" / "clusters")
    args = parser.parse_args()
    truth = json.loads((args.truth / "interconnects.json").read_text(encoding="utf-8"))
    for cluster in presets(truth):
        codec.save(cluster, args.out / f"{cluster.name}.json")
        print(f"{cluster.name:22} {cluster.num_devices:3} devices  {cluster.status}")


if __name__ == "__main__":
    main()
