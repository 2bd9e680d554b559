"""``asa.parallelize``: a training loop of the user's own."""
