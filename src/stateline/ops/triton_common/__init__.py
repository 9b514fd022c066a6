"""Shared parts of the GPU kernels compiled by Triton, and of their backends.

``TRITON_INTERPRET=1`` runs the kernels on tensors of the CPU by Triton's interpreter: slowly, for
tests.
"""
