"""The bandwidth and the arithmetic rate of the machine, measured in the same run as the figures."""

from dataclasses import dataclass

import torch

from stateline.bench.timing import interleave

COPY_BYTES = 1 << 28
"""Larger than any cache."""

MATRIX = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices that are multiplied."""

SECONDS = 0.3
"""Time for each of the two measurements."""


@dataclass(frozen=True)
class Peaks:
    """Ceilings of a device.

    Attributes:
        bytes_per_second: Bytes read and written by a copy of a large tensor.
        flops_per_second: Of a square matrix product in the precision of the measurement.
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
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = interleave(
        {"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, b, out=out)},
        seconds=SECONDS,
        device=device,
    )
    return Peaks(
        2 * source.nbytes / min(times["copy"].samples), 2 * side**3 / min(times["product"].samples)
    )
