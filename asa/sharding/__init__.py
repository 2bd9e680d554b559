"""Splitting modules over ranks, and the boundaries between layouts. Torch at work; reached from ``apply()`` only."""
