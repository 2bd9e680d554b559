"""Seconds of communication: collectives, messages between stages, and what of it is hidden."""
