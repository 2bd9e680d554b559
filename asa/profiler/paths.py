"""Paths of stored profiles. It needs no torch, because the command line looks for profiles before it knows whether it
needs torch."""

from __future__ import annotations

import re
from pathlib import Path

from asa.ir.profile import DeviceRecord, Profile


def slug(text: str) -> str:
    """``text`` as a part of a file name: lower case, with ``-`` for all characters but letters, digits and ``_-``.

    >>> slug("timm:resnet50.a1"), slug("NVIDIA H100 80GB HBM3")
    ('timm-resnet50-a1', 'nvidia-h100-80gb-hbm3')
    """
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-") or "unnamed"


def device_slug(device: DeviceRecord) -> str:
    """``cpu``, or the name of the GPU, so that profiles of several GPUs can be stored side by side."""
    return "cpu" if device.type == "cpu" else slug(device.name)


def profile_path(profile: Profile, folder: Path = Path("profiles")) -> Path:
    """Path ``<folder>/<model>.<device>[-<execution>].<precision>.json``."""
    way = f"-{slug(profile.execution)}" if profile.execution else ""
    return folder / f"{slug(profile.model_spec)}.{device_slug(profile.device)}{way}.{profile.precision}.json"
