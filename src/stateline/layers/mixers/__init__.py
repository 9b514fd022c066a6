"""Layers that mix a sequence: one per file, and the parts that several of them share."""
