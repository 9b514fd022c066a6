"""Layers made from a core, which may be any sequence layer."""
