"""GPU kernels compiled by Triton, and what their backends share.

``TRITON_INTERPRET=1`` runs the kernels on tensors of the CPU by Triton's interpreter: slowly, for
tests.
"""
