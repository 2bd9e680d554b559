"""A rank's part of a model and of its optimizer, used like the originals."""
