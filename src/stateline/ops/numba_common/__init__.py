"""Shared parts of the CPU kernels compiled by numba, and of their backends.

Importing this package imports numba. Backends are imported when their op is first called, so that
``import stateline`` does not wait for it.
"""

try:
    import numba  # noqa: F401
except ImportError as error:
    raise ImportError("numba is not installed: pip install numba") from error
