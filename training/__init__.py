"""Parts of the training loop: optimizer, processes, checkpoints, evaluation, metrics."""
