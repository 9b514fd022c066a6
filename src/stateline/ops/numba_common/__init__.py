"""Shared parts of the CPU kernels compiled by numba, and of their backends.

Its modules import numba. Backends are imported when their op is first called, so that
``import stateline`` does not wait for it.
"""
