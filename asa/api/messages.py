"""Messages to the user's program during start-up: one line per phase, on standard error, from rank 0 only."""

from __future__ import annotations

import sys

from asa.api.rank_context import RankContext


def say(context: RankContext, text: str) -> None:
    """Write one line to standard error, on rank 0."""
    if context.rank == 0:
        sys.stderr.write(f"asa: {' '.join(text.split())}\n")
        sys.stderr.flush()
