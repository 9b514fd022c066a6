"""Random numbers as a function of seed, row and count: Philox in integer tensors."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW = 0xFFFFFFFF


def uniform(random: Int[Tensor, "batch 3"], count: int) -> Float[Tensor, "batch count"]:
    """The next numbers in (0, 1] of each row, by the row's seed, row number and count.

    The generator is counter-based, so three integers are all the state that a row needs, and the
    numbers of one row do not depend on another row. They are one minus the first doubles of NumPy's
    ``Generator(Philox(key=[seed, row], counter=count))``, to the last bit, in float64; in float32
    on devices without float64.

    Args:
        random: Seed, row number and count of each row.
        count: How many numbers per row.

    Example:
        >>> uniform(torch.tensor([[0, 0, 0], [0, 0, 1]]), 2)
        tensor([[0.9885, 0.4976],
                [0.4976, 0.7462]], dtype=torch.float64)

    References:
        Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011 (Philox4x64-10).
    """
    places = torch.arange(1, count + 1, device=random.device)  # NumPy counts before it draws
    counters = random[:, 2:] + places
    bits = _philox(counters, random[:, :1], random[:, 1:2])
    fractions = _shift(bits, 11).to(widest(random.device)) * 2.0**-53
    return 1 - fractions


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def _philox(counter: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """First of the four 64-bit words of Philox4x64-10; the counter's upper words are zero."""
    zero = torch.zeros_like(counter)
    x0, x1, x2, x3 = counter, zero, zero, zero
    for number in range(_ROUNDS):
        k0, k1 = (
            key + _signed(number * step) for key, step in zip((key0, key1), _KEY_STEPS, strict=True)
        )
        (high0, low0), (high1, low1) = (
            _multiply(x, factor) for x, factor in zip((x0, x2), _MULTIPLIERS, strict=True)
        )
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
    return x0


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low half of the 128-bit product of unsigned 64-bit integers."""
    high, low = factor >> 32, factor & _LOW
    x_high, x_low = _shift(x, 32), x & _LOW
    middle = high * x_low + _shift(low * x_low, 32)
    carry = low * x_high + (middle & _LOW)
    return high * x_high + _shift(middle, 32) + _shift(carry, 32), x * _signed(factor)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right as unsigned integers."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(word: int) -> int:
    """The lowest 64 bits of an integer, as a signed one."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
