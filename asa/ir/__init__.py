"""The records that all other packages exchange: frozen dataclasses with keyword-only fields. No torch."""
