"""Names: of the device, and of the files its profiles go to."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
import torch

from asa.errors import UnavailableError, UsageError
from asa.ir.profile import DeviceRecord
from asa.profiler.machine import choose_device, device_record, free_memory, total_memory
from asa.profiler.paths import device_slug, slug


def test_a_rank_may_use_its_cores_share_of_memory():
    record = device_record(torch.device("cpu"))
    assert record.type == "cpu"
    assert record.name
    assert record.threads == 1
    assert 0 < record.memory_bytes * len(os.sched_getaffinity(0)) <= psutil.virtual_memory().total
    assert 0 < free_memory(torch.device("cpu")) <= total_memory()


def test_devices_are_chosen_by_name():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(UsageError, match="'tpu'"):
        choose_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none():
    assert choose_device("auto").type == "cpu"
    with pytest.raises(UnavailableError, match="--device cpu"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("resnet50", "resnet50"), ("package.module:factory", "package-module-factory"), ("../x", "x"), ("Δ", "unnamed")],
)
def test_slugs_are_safe_pieces_of_a_file_name(text, expected):
    assert slug(text) == expected


def test_gpus_are_told_apart_by_name_and_cpus_are_not():
    gpu = DeviceRecord(type="cuda", name="NVIDIA A100-SXM4-80GB", memory_bytes=1, threads=1)
    cpu = DeviceRecord(type="cpu", name="AMD EPYC", memory_bytes=1, threads=1)
    assert (device_slug(gpu), device_slug(cpu)) == ("nvidia-a100-sxm4-80gb", "cpu")


def test_paths_need_no_torch():
    code = "import sys, asa.profiler.paths; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
