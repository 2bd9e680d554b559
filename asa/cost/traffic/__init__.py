"""Seconds of communication: collectives, messages between stages, and the part that compute hides."""
