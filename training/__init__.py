"""What the training loop calls: optimizer, processes, checkpoints, evaluation, metrics."""
