"""Measurements of speed and cost."""
