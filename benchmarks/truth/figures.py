"""How the planning compares with what others published: figures beside their targets."""

from __future__ import annotations

from asa.ir.codec import noun


@noun
class Figure:
    """One comparison. ``met`` is None where there is no target; ``note``: how it came about, or why it fell short."""

    part: str
    name: str
    figure: float
    unit: str
    target: str
    met: bool | None
    note: str


@noun
class Truth:
    """All figures of one run. ``left_out``: what was not compared, and why."""

    figures: tuple[Figure, ...]
    left_out: tuple[str, ...]

    @property
    def missed(self) -> int:
        """Figures that have a target and do not reach it."""
        return sum(f.met is False for f in self.figures)
