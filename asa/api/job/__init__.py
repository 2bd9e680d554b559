"""``asa.Job``: complete training on the user's own loader."""
