"""Training: configuration, optimizer, updates, checkpoints, the loop."""
