"""Random numbers as a function of seed, step and sample, so that they do not depend on the plan."""
