"""What a program of the user's own hears while it starts: one line a phase, on standard error, from rank 0 alone."""

from __future__ import annotations

import sys

from asa.api.rank_context import RankContext


def say(place: RankContext, text: str) -> None:
    """Write one line."""
    if place.rank == 0:
        sys.stderr.write(f"asa: {' '.join(text.split())}\n")
        sys.stderr.flush()
