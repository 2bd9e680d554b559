"""Parts of a training loop around a step: worker, optimizer, checkpoints, measurement, migration between plans."""
