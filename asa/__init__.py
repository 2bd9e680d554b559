"""asa: decides how to train a neural network on the devices you have, trains it that way, checks it was right."""

from __future__ import annotations

__version__ = "0.1.0"
