"""Formats results as tables, figures and self-contained pages. Numbers get their units only here. No torch."""
