"""Seconds of computation: of components, of ranks side by side, and of updates on the host."""
