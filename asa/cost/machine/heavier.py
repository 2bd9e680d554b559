"""What-if profiles in which activations are larger by a factor."""

from __future__ import annotations

import math
from dataclasses import replace

from asa.ir.profile import Profile


def heavier_profile(profile: Profile, factor: float) -> Profile:
    """A copy with ``factor`` times the saved and transient bytes. Parameters, gradients and optimizer state are known
    exactly, so they stay."""
    if factor == 1.0:
        return profile
    return replace(
        profile,
        timings=tuple(
            replace(
                t,
                saved_bytes=math.ceil(factor * t.saved_bytes),
                transient_bytes=math.ceil(factor * t.transient_bytes),
                unmade_bytes=math.floor(min(1.0, factor) * t.unmade_bytes),
            )
            for t in profile.timings
        ),
    )
