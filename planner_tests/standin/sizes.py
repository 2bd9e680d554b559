"""Work that is cut out for GPUs, made small enough for a core: the same calls, on less."""

from __future__ import annotations


def shrink() -> None:
    """Fewer numbers in what is measured of a GPU alone and between GPUs."""
    from asa.executor.training import probe
    from asa.profiler import ceilings, components, interconnect, interference

    components._SIDE = 64
    probe._SIZE["cuda"], probe._TIMES["cuda"] = 64, 1
    ceilings._SIDE["cuda"], ceilings._COPIED["cuda"] = 64, 1 << 16
    interference._GPU_SCALE, interference._MATRIX = 1, 16
    interference._PASS_BYTES, interference._SAMPLE_S, interference._MOST_ROUNDS = 1 << 20, 1e-3, 3
    interference._BUCKET_BYTES = 1 << 16
    interconnect.SIZES = (1024, 16384, 65536)
