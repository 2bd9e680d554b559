"""Layout rules of a split component's input and output: partial sums or shards of tokens on its tensor group."""

from __future__ import annotations

from asa.ir.codec import hashed, noun
from asa.ir.graph import Component
from asa.ir.layout import Boundary, Layout


@hashed
@noun
class Ends:
    """The layout rules of the two sides of a boundary, for any layouts: fields of :class:`asa.ir.layout.Boundary`."""

    exit_partial: bool = False
    entry_partial: bool = False
    exit_tokens: int = 0
    entry_tokens: int = 0

    @staticmethod
    def between(before: Component | None, after: Component | None) -> Ends:
        """The rules of the output of ``before`` and the input of ``after``; None stands for a whole tensor."""
        source = before.split if before is not None else None
        target = after.split if after is not None else None
        return Ends(
            exit_partial=source is not None and source.exit_partial,
            entry_partial=target is not None and target.entry_partial,
            exit_tokens=source.sequence.exit_tokens if source and source.sequence else 0,
            entry_tokens=target.sequence.tokens if target and target.sequence else 0,
        )

    def boundary(self, source: Layout, target: Layout) -> Boundary:
        """The boundary between two layouts."""
        return Boundary(
            source=source, target=target, exit_partial=self.exit_partial, entry_partial=self.entry_partial,
            exit_tokens=self.exit_tokens, entry_tokens=self.entry_tokens,
        )  # fmt: skip
