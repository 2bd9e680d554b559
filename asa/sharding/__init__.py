"""Splits modules over ranks and converts activations between layouts. It uses torch, so only ``apply()`` imports it."""
