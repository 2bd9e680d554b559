"""Messages between ranks: collectives of an axis, changes of layout, transfers between stages, and waiting times."""
