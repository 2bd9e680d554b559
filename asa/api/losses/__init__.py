"""Losses of a program that computes on parts of a batch: corrected, or compared with the loss on the whole batch."""
