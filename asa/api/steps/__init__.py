"""A step on all ranks: their rows of a batch, and checks that they do the same."""
