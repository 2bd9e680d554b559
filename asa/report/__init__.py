"""Nouns as tables, figures and one self-contained page. Numbers get their units here and nowhere else. No torch."""
