"""The commands, one module each, and the parts that belong to one command alone."""
