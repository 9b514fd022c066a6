"""Training: configuration, optimizer groups, the loop."""
