"""The problem inside a stage, as numbers, and the solvers for it."""
