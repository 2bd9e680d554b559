"""What a training loop needs around a step: worker, optimizer, votes, checkpoints, moves between plans."""
