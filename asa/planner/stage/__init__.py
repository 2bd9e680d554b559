"""The problem inside a stage, as numbers, and its solvers."""
