"""Splits modules over ranks, and converts activations between layouts. Uses torch; imported only by ``apply()``."""
