"""Whole models: the pattern grammar, their configuration, their size, and their files."""
