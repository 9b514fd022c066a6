"""Position encodings of attention: rotary, ALiBi, Hard-ALiBi and T5 buckets."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.kernel_op import values_at_hand
from stateline.ops.pointwise import rotary

UNLIMITED = torch.iinfo(torch.int64).max
"""Window of a head that sees all previous positions."""


class RopeScaling(NamedTuple):
    r"""How rotary frequencies are lowered for inputs longer than the inputs of pretraining.

    ``linear`` divides all frequencies by s = ``factor``. ``llama3`` does so for wavelengths above
    ``original_len / low``, leaves those below ``original_len / high`` as they are, and in between
    multiplies a frequency f by :math:`u + (1 - u) / s`, where
    :math:`u = (L f / 2 \pi - \mathrm{low}) / (\mathrm{high} - \mathrm{low})` and
    L = ``original_len``.

    ``yarn`` has the same limits and interpolates between them linearly in the number of the pair:
    with t(n) the place among r/2 pairs at which a pair would make n turns in L positions,
    :math:`u = (t(\mathrm{low}) - t) / (t(\mathrm{low}) - t(\mathrm{high}))`. ``truncate`` rounds
    t(high) down and t(low) up. Rotated queries and keys are multiplied by ``attention_factor``, by
    default :math:`0.1 \ln s + 1`, their products by its square (:attr:`score_factor`).

    References:
        Chen et al., "Extending Context Window of Large Language Models via Positional
        Interpolation", 2023; Grattafiori et al., "The Llama 3 Herd of Models", 2024; Peng et al.,
        "YaRN: Efficient Context Window Extension of Large Language Models", 2023, sections 3.2 to
        3.4; the rounding and its limits are those of its code.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original_len: int = 8192
    attention_factor: float | None = None
    truncate: bool = True

    def scale(self, frequency: Float[Tensor, " pair"], base: float) -> Float[Tensor, " pair"]:
        """The lowered frequencies, in radians per position."""
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "yarn":
            kept = self._kept_by_place(frequency, base)
        else:
            turns = self.original_len * frequency / (2 * math.pi)
            kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)

    @property
    def score_factor(self) -> float:
        """Factor of the products of rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        given = self.attention_factor
        return (yarn_factor(self.factor) if given is None else given) ** 2

    def _kept_by_place(
        self, frequency: Float[Tensor, " pair"], base: float
    ) -> Float[Tensor, " pair"]:
        """YaRN's share of each frequency that is not divided."""
        pairs = len(frequency)
        first, last = (
            pairs * math.log(self.original_len / (2 * math.pi * turns)) / math.log(base)
            for turns in (self.high, self.low)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        place = torch.arange(pairs, device=frequency.device, dtype=frequency.dtype)
        return 1 - ((place - first) / ((last - first) or 0.001)).clamp(0, 1)


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    r"""YaRN's factor of rotated queries and keys, :math:`0.1 w \ln s + 1`; 1 for s below 1."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1


def rotate(
    x: Float[Tensor, "batch length head d_head"],
    positions: Int[Tensor, "rows length"],
    *,
    dims: int,
    base: float = 10_000.0,
    scaling: RopeScaling | None = None,
) -> Float[Tensor, "batch length head d_head"]:
    r"""Rotary position embedding (RoPE) of the first ``dims`` entries; the others stay as they are.

    Entries t and t + r/2 (r = ``dims``) are a pair, rotated by the angle
    :math:`p\, \mathrm{base}^{-2t/r}` at position p. Angles are computed in float32 or better.
    Lengths stay as they are, also with YaRN.

    Args:
        x: Queries or keys.
        positions: Position of each token; one row is shared by the whole batch.
        dims: Number of rotated entries; even.
        base: Base of the angles; the slowest pair has a period of 2 pi base^(1 - 2/r) positions.
        scaling: Change of the frequencies; ``None`` means none.

    Returns:
        The rotated tensor, in the dtype of ``x``.

    References:
        Su et al., "RoFormer", 2021; pairing and partial rotation as in GPT-NeoX.
    """
    frequency = frequencies(x, dims=dims, base=base, scaling=scaling)
    return rotary(x, *rotation(positions, frequency))


def frequencies(
    like: Tensor, *, dims: int, base: float, scaling: RopeScaling | None = None
) -> Float[Tensor, " pair"]:
    """Angle per position of each pair of :func:`rotate`.

    It lies on the device of ``like`` and has its dtype, but float32 at least.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    pair = torch.arange(dims // 2, device=like.device, dtype=dtype)
    frequency = base ** (-2 * pair / dims)
    return frequency if scaling is None else scaling.scale(frequency, base)


def rotation(
    positions: Int[Tensor, "rows length"], frequency: Float[Tensor, " pair"]
) -> tuple[Float[Tensor, "rows length pair"], Float[Tensor, "rows length pair"]]:
    """Cosine and sine of the angles of :func:`rotate`; queries and keys share them."""
    if torch.compiler.is_compiling():
        cos, sin = _opaque_rotation(positions, frequency)
        return cos, sin
    return _rotation(positions, frequency)


def _rotation(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    angle = _angles(positions, frequency)
    return angle.cos(), angle.sin()


_opaque_rotation = torch.library.custom_op(
    "stateline::rotation",
    _rotation,
    mutates_args=(),
    schema="(Tensor _0, Tensor _1) -> (Tensor, Tensor)",
)
"""One node of a graph: the compiler would compute each sine anew for every row, head and reader."""


@_opaque_rotation.register_fake
def _(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    shape = *positions.shape, len(frequency)
    return frequency.new_empty(shape), frequency.new_empty(shape)


NEAR = 4096
"""Below this position, float32 angles are accurate enough."""


def _angles(
    positions: Int[Tensor, "rows length"], frequency: Float[Tensor, " pair"]
) -> Float[Tensor, "rows length pair"]:
    """Position times frequency; in float32, far positions are reduced to one turn in float64.

    The angle of position 27 million has no digits left in float32. On mps, which has no float64,
    angles are not reduced.
    """
    place = positions[..., None]
    near = place.to(frequency.dtype) * frequency
    if frequency.dtype == torch.float64 or place.device.type == "mps":
        return near
    if values_at_hand(positions) and bool((positions < NEAR).all()):
        return near
    turns = place.double() * frequency.double() % (2 * math.pi)
    return torch.where(place < NEAR, near, turns.to(near.dtype))


def alibi_slopes(n_heads: int, device: torch.device | None = None) -> Float[Tensor, " head"]:
    r"""Slopes :math:`m_h = 2^{-8h/H}`, h = 1..H, of ALiBi; any number of heads.

    If H is not a power of two, the slopes of the next power of two are reordered (every second one
    first, then the others), and the first H are taken.

    Example:
        >>> alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
        >>> alibi_slopes(3)
        tensor([0.0625, 0.0039, 0.2500])

    References:
        Press et al., "Train Short, Test Long", ICLR 2022; other head counts as in MPT.
    """
    power = 1 << (n_heads - 1).bit_length()
    slopes = 2.0 ** (-8 * torch.arange(1, power + 1, device=device) / power)
    if power == n_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:n_heads]


def hard_alibi_windows(
    n_heads: int, masked_heads: int, device: torch.device | None = None
) -> Int[Tensor, " head"]:
    """Windows of Hard-ALiBi: head h < ``masked_heads`` sees h tokens back, other heads see all.

    Example:
        >>> hard_alibi_windows(4, 2).tolist()[:2]
        [1, 2]

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 2.2.
    """
    windows = torch.full((n_heads,), UNLIMITED, device=device)
    windows[:masked_heads] = torch.arange(1, masked_heads + 1, device=device)
    return windows


def t5_buckets(
    distance: Int[Tensor, "*shape"], *, n_buckets: int = 32, max_distance: int = 128
) -> Int[Tensor, "*shape"]:
    r"""Bucket of each distance to an earlier position, as in T5.

    With m = ``n_buckets`` / 2 and M = ``max_distance``, distance n < m has bucket n. Larger
    distances share buckets, :math:`m + \lfloor m \log(n / m) / \log(M / m) \rfloor`, up to the last
    bucket for M and beyond.

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
