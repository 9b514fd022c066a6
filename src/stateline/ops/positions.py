"""Position schemes of attention: what distinguishes one key from another besides its content."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

UNLIMITED = torch.iinfo(torch.int64).max
"""Window of a head that sees the whole past."""


def rotate(
    x: Float[Tensor, "batch length head d_head"],
    positions: Int[Tensor, "rows length"],
    *,
    dims: int,
    base: float = 10_000.0,
) -> Float[Tensor, "batch length head d_head"]:
    r"""Rotary position embedding (RoPE) of the first ``dims`` entries; the rest pass through.

    Entries t and t + r/2 (r = ``dims``) are a pair, turned by the angle
    :math:`p\, \mathrm{base}^{-2t/r}` at position p. Angles are computed in float32 or better.

    Args:
        x: Queries or keys.
        positions: Position of each entry; one row serves the whole batch.
        dims: How many entries are rotated; even.
        base: The slowest pair turns once in about 2 pi base positions.

    Returns:
        The rotated tensor, in the dtype of ``x``.

    References:
        Su et al., "RoFormer", 2021; pairing and partial rotation as in GPT-NeoX.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    pair = torch.arange(dims // 2, device=x.device, dtype=dtype)
    angle = positions[..., None].to(dtype) * base ** (-2 * pair / dims)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]  # (rows, length, 1, pair)
    first, second = x[..., : dims // 2].to(dtype), x[..., dims // 2 : dims].to(dtype)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., dims:]], dim=-1)


def alibi_slopes(n_heads: int) -> Float[Tensor, " head"]:
    r"""Slopes :math:`m_h = 2^{-8h/H}`, h = 1..H, of ALiBi; any number of heads.

    For H that is not a power of two, the slopes of the next power of two are taken, every second
    one first.

    Example:
        >>> alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
        >>> alibi_slopes(3)
        tensor([0.0625, 0.0039, 0.2500])

    References:
        Press et al., "Train Short, Test Long", ICLR 2022; other head counts as in MPT.
    """
    power = 1 << (n_heads - 1).bit_length()
    slopes = 2.0 ** (-8 * torch.arange(1, power + 1) / power)
    if power == n_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:n_heads]


def hard_alibi_windows(n_heads: int, masked_heads: int) -> Int[Tensor, " head"]:
    """Windows of Hard-ALiBi: head h < ``masked_heads`` sees itself and h tokens back, the rest all.

    Example:
        >>> hard_alibi_windows(4, 2).tolist()[:2]
        [1, 2]

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 2.2.
    """
    windows = torch.full((n_heads,), UNLIMITED)
    windows[:masked_heads] = torch.arange(1, masked_heads + 1)
    return windows


def t5_buckets(
    distance: Int[Tensor, "*shape"], *, n_buckets: int = 32, max_distance: int = 128
) -> Int[Tensor, "*shape"]:
    r"""Bucket of each distance backward, as in T5: near ones by themselves, far ones together.

    With m = ``n_buckets`` / 2, distance n has bucket n below m, and above it
    :math:`m + \lfloor m \log(n / m) / \log(M / m) \rfloor`, up to the last one at M =
    ``max_distance`` and beyond.

    Example:
        >>> t5_buckets(torch.tensor([0, 15, 16, 31, 32, 127, 1000])).tolist()
        [0, 15, 16, 21, 21, 31, 31]

    References:
        Raffel et al., "Exploring the Limits of Transfer Learning", 2020, and its code.
    """
    exact = n_buckets // 2
    far = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact)
    bucket = (exact + (far * (n_buckets - exact)).long()).clamp(max=n_buckets - 1)
    return torch.where(distance < exact, distance, bucket)
