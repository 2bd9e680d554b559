"""What-if profiles in which every time is longer by a factor."""

from __future__ import annotations

from dataclasses import replace

from asa.ir.profile import Profile, Stat, Timing


def slower_profile(profile: Profile, factor: float) -> Profile:
    """A copy in which every time is ``factor`` times as long."""

    def scaled(s: Stat) -> Stat:
        return Stat(median=factor * s.median, p10=factor * s.p10, p90=factor * s.p90, n=s.n)

    def slowed(timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
        return tuple(replace(t, forward=scaled(t.forward), backward=scaled(t.backward)) for t in timings)

    return replace(
        profile,
        timings=slowed(profile.timings),
        by_tokens=None if profile.by_tokens is None else slowed(profile.by_tokens),
        updates=tuple(replace(u, step=scaled(u.step)) for u in profile.updates),
        dispatch_floor_s=factor * profile.dispatch_floor_s,
    )
