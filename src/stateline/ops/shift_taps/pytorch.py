"""The correlation by FFT, on any device."""

from torch import Tensor
from torch.nn.functional import pad

from stateline.ops.fft_conv import fft_conv


def shift_taps(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Convolve with the reversed input vector."""
    later = c.shape[1] - 1
    return fft_conv(pad(c, (0, later)).mT, b.flip(-1))[later:].mT + pad(skip[:, None], (0, later))
