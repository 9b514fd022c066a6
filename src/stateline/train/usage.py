"""How much of a GPU a run uses: memory, and the share of its arithmetic."""

import torch

from stateline.devices import cuda_seconds
from stateline.models.factory import AnyModel

SIDE = 4096
"""Rows of the square matrices whose product measures the rate of the device."""

PRODUCTS = 20
"""Products that are timed together, after the same number to warm up."""

BACKWARD = 3
"""Operations of an update, divided by the operations of the forward pass."""


class Usage:
    """Measures the device once, and then reads its counters when a line is logged.

    On other devices than CUDA there is nothing to read.

    Args:
        model: The model that is trained.
        length: Positions of a row.
        dtype: Precision of its products.
        device: Where it is.
        flops_per_second: Arithmetic that the device reaches; by default it is measured.
    """

    def __init__(
        self,
        model: AnyModel,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        flops_per_second: float | None = None,
    ) -> None:
        self.device, self.measured = device, device.type == "cuda"
        self.flops_per_token = BACKWARD * model.flops_per_token(length)
        if flops_per_second is None and self.measured:
            flops_per_second = rate_of_products(device, dtype)
        self.flops_per_second = flops_per_second

    def utilisation(self, tokens_per_second: float) -> float | None:
        """Model-flops utilisation at a training speed of one device, or ``None``."""
        if not self.flops_per_second:
            return None
        return tokens_per_second * self.flops_per_token / self.flops_per_second

    def memory(self) -> int | None:
        """The most bytes since the last call, or ``None``."""
        if not self.measured:
            return None
        most = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return most


def rate_of_products(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of large matrix products on a CUDA device."""
    a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    _, seconds = (cuda_seconds(lambda: a @ b, PRODUCTS, device) for _ in range(2))
    return PRODUCTS * 2 * SIDE**3 / seconds
