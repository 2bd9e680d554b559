"""A whole run: loop, ranks, recovery, folders, export."""
