"""Seconds of computation: of components, of ranks beside each other, of updates on the host."""
