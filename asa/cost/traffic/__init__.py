"""Seconds of communication: collectives, messages between stages, and what of it hides."""
