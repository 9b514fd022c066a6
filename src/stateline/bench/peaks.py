"""The bandwidth and the arithmetic rate of the machine, measured in the same run as the figures."""

from dataclasses import dataclass
from functools import partial

import torch

from stateline.bench.timing import Call, interleave

COPY_BYTES = 1 << 28
"""Larger than any cache."""

MATRIX = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices that are multiplied."""

SECONDS = 0.3
"""Time for each measurement."""


@dataclass(frozen=True)
class Peaks:
    """Ceilings of a device.

    Attributes:
        bytes_per_second: Bytes read and written by a copy of a large tensor.
        flops_per_second: Of a square matrix product, in the precision of the measurement or in
            float32: the faster one, because kernels may compute in either.
    """

    bytes_per_second: float
    flops_per_second: float

    def floor(self, n_bytes: float, flops: float) -> float:
        """Least seconds for this traffic and arithmetic, if they overlap perfectly."""
        return max(n_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_peaks(device: torch.device, dtype: torch.dtype = torch.float32) -> Peaks:
    """Measure a copy and a product of matrices, with as many threads as PyTorch now uses."""
    source = torch.zeros(COPY_BYTES // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    side = MATRIX.get(device.type, 1024)
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    for kind in {dtype, torch.promote_types(dtype, torch.float32)}:
        calls[str(kind)] = partial(
            torch.mm, a.to(kind), b.to(kind), out=a.new_empty(side, side, dtype=kind)
        )
    times = interleave(calls, seconds=SECONDS, device=device)
    copy, *products = (min(timing.samples) for timing in times.values())
    return Peaks(2 * source.nbytes / copy, 2 * side**3 / min(products))
