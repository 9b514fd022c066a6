"""The definition of a causal convolution."""

import torch
from jaxtyping import Float
from torch import Tensor


def fft_conv(
    u: Float[Tensor, "*batch length channel"], kernel: Float[Tensor, "output taps"]
) -> Float[Tensor, "*batch length output"]:
    r"""Sum the delayed signals, :math:`y_t = \sum_{s=0}^{t} k_s\, u_{t-s}`, for each kernel."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    signal, taps = u.to(dtype).tile(len(kernel) // u.shape[-1]), kernel.to(dtype)
    length = u.shape[-2]
    y = torch.zeros_like(signal)
    for delay in range(min(length, taps.shape[1])):
        delayed = torch.nn.functional.pad(signal[..., : length - delay, :], (0, 0, delay, 0))
        y = y + taps[:, delay] * delayed
    return y.to(u.dtype)
