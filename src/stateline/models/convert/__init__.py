"""Official weights in our models: one file per family, from its names to ours."""
