"""The problem inside a stage: numbers, and the solvers that agree on them."""
