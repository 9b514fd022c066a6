"""The definition of a causal convolution does not depend on the number of taps."""

from stateline.ops.fft_conv.reference import fft_conv as short_conv

__all__ = ["short_conv"]
