"""Official weights in our models: one file per family."""
