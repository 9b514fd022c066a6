"""Shared parts of attention layers: heads, biases of projections, rotary positions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer
from stateline.layers.decoder import prepared
from stateline.layers.norm import OffsetRMSNorm, RMSNorm
from stateline.ops import rotary as turn
from stateline.ops.kernel_op import values_at_hand
from stateline.ops.positions import RopeScaling, frequencies, rotation
from stateline.settings import Choice, Count, Fraction, NotNegative, Positive, Settings

Biases = bool | Literal["qkv", "out"]
"""Projections with a bias: all, none, the first (queries, keys, values) or the last one."""


def head_sizes(
    d_model: int, n_heads: int, n_kv_heads: int | None, d_head: int | None
) -> tuple[int, int]:
    """Number of heads of keys and values, and width of a head."""
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if d_head is None and d_model % n_heads:
        raise InputError(f"n_heads must divide d_model, got {n_heads=} and {d_model=}")
    if n_heads % n_kv_heads:
        raise InputError(f"n_kv_heads must divide n_heads, got {n_kv_heads=} and {n_heads=}")
    return n_kv_heads, d_head or d_model // n_heads


def check_normalised(d_model: int, n_heads: int, d_head: int) -> None:
    """Refuse heads of one number, which a norm that subtracts the mean makes zero."""
    if d_head == 1:
        raise InputError(
            "a head must have at least 2 numbers, since each head is normalised and one number "
            f"would become zero, got {d_model=} and {n_heads=}: lower n_heads or raise d_model"
        )


def appended(
    cache: Float[Tensor, "batch slot *width"],
    new: Float[Tensor, "batch length *width"],
    held: Int[Tensor, " batch"],
) -> Float[Tensor, "batch room *width"]:
    """A cache with ``length`` more slots; new tokens follow the tokens that each row holds."""
    new = new.to(cache.dtype)
    starts = set(held.tolist()) if values_at_hand(held) else ()
    if len(starts) == 1:  # one copy takes a fifth of the time
        (start,) = starts
        return torch.cat([cache[:, :start], new, cache[:, start:]], dim=1)
    length = new.shape[1]
    room = F.pad(cache, (0, 0) * (cache.dim() - 2) + (0, length))
    slots = held[:, None] + torch.arange(length, device=new.device)
    index = slots.view(*slots.shape, *(1,) * (new.dim() - 2)).expand_as(new)
    return room.scatter_(1, index, new)


def joined(caches: Sequence[Float[Tensor, "_ _ *width"]]) -> Float[Tensor, "batch slot *width"]:
    """The rows of caches of different lengths; shorter ones get free slots."""
    slots = max(cache.shape[1] for cache in caches)
    axes = (0, 0) * (caches[0].dim() - 2)
    return torch.cat([F.pad(cache, (*axes, 0, slots - cache.shape[1])) for cache in caches])


class Rotary(NamedTuple):
    """Rotary positions of queries and keys: see :func:`stateline.ops.positions.rotate`."""

    dims: int
    base: float
    scaling: RopeScaling | None


class HeadMaps(NamedTuple):
    """The maps from the input to queries, keys and values of every head."""

    q: Float[Tensor, "head d_head d_model"]
    k: Float[Tensor, "head d_head d_model"]
    v: Float[Tensor, "head d_head d_model"]

    def of(self, heads: Sequence[int]) -> "HeadMaps":
        """The maps of some heads."""
        return HeadMaps(*(each[list(heads)] for each in self))


class TakesHeads(ABC):
    """A recurrence that begins better with the queries, keys and values of attention.

    Keys that are scaled to unit length are what makes that true: without it, sums and products of
    a trained model's keys and values are too large.
    """

    @abstractmethod
    def take(self, maps: HeadMaps) -> bool:
        """Begin with the maps of as many heads of the same width; otherwise change nothing.

        Returns:
            Whether they were taken.
        """


class MixesValues(ABC):
    """A layer whose heads give sums of values, with weights that follow from the input."""

    @abstractmethod
    def mixing(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch head length length"]:
        """The weight of the value of each position (last axis) at each position, in every head.

        What comes after the sum, such as norms and gates, is no part of it.
        """


def weights_of(
    mix: Callable[[Float[Tensor, "batch length kv_head width"]], Tensor],
    like: Float[Tensor, "batch length kv_head width"],
) -> Float[Tensor, "batch head length length"]:
    """The weights of a linear function of values: its outputs, where the values are unit vectors.

    Args:
        mix: The function.
        like: Values; the function is given values of their shape and kind.
    """
    length, width = like.shape[1], like.shape[3]
    units = F.pad(torch.eye(length, dtype=like.dtype, device=like.device), (0, -length % width))
    parts = [mix(part[None, :, None].expand_as(like)) for part in units.split(width, dim=1)]
    return torch.cat(parts, dim=-1)[..., :length].transpose(1, 2)


class RotatesHeads(nn.Module):
    """A layer that rotates queries and keys by their positions; without ``rotary`` it does not."""

    rotary: Rotary | None
    out_proj: nn.Linear

    @prepared
    def frequency(self) -> Float[Tensor, " pair"]:
        """Angle per position of each pair."""
        assert self.rotary is not None
        dims, base, scaling = self.rotary
        return frequencies(self.out_proj.weight, dims=dims, base=base, scaling=scaling)

    def rotated(
        self,
        positions: Int[Tensor, "rows length"],
        *vectors: Float[Tensor, "batch length _ d_head"],
    ) -> Sequence[Float[Tensor, "batch length _ d_head"]]:
        """Queries, keys or both, rotated by the angles of their positions."""
        if self.rotary is None:
            return vectors
        angles = rotation(positions, self.frequency())
        if positions.shape[1] > 1 or len(vectors) == 1:
            return [turn(x, *angles) for x in vectors]
        # for one token, a call takes longer than joining and splitting
        joint = turn(torch.cat(vectors, dim=2), *angles)
        return joint.split([x.shape[2] for x in vectors], dim=2)


class SoftmaxHeads(SequenceLayer[Any], RotatesHeads):
    """Attention whose heads a layer in its place can begin with, or keep."""

    settings: Any
    n_heads: int
    n_kv_heads: int
    d_head: int
    per_head: ClassVar[Sequence[str]] = ()
    """Other weights that have a row for each head."""

    @property
    @abstractmethod
    def first_maps(self) -> Sequence[nn.Linear]:
        """The maps whose rows are those of queries, keys and values, in this order."""

    @abstractmethod
    def within(self, window: int) -> "SoftmaxHeads | None":
        """A layer with the same weights whose heads see at most the last positions, if any can."""

    def head_maps(self) -> HeadMaps:
        """The maps to queries, keys and values; heads that share keys have them each."""
        q, k, v = self._by_head("weight")
        return HeadMaps(q[:, : self.d_head], k, v)

    def _by_head(self, name: str) -> Sequence[Tensor]:
        """Rows of the first maps for queries (with the gate), keys and values of every head."""
        rows = torch.cat([each.get_parameter(name).detach() for each in self.first_maps])
        heads, n = rows.unflatten(0, (-1, self.d_head)), self.n_kv_heads
        q, k, v = heads.split([len(heads) - 2 * n, n, n])
        shared = [t.repeat_interleave(self.n_heads // n, dim=0) for t in (k, v)]
        return [q.unflatten(0, (self.n_heads, -1)).flatten(1, 2), *shared]

    def can_be_part_of(self, old: "SoftmaxHeads") -> bool:
        """Whether the heads are like some of another layer, and share no keys."""
        own = self.settings
        if type(own) is not type(old.settings):
            return False
        sized = replace(
            old.settings, n_heads=own.n_heads, n_kv_heads=own.n_kv_heads, d_head=own.d_head
        )
        same = sized == own and not isinstance(own.qk_norm, Joint)
        return same and self.n_kv_heads == self.n_heads and self.d_head == old.d_head

    @torch.no_grad()
    def take_heads(self, old: "SoftmaxHeads", heads: Sequence[int]) -> None:
        """Begin as some heads, as many as there are, of a layer of which this can be a part."""
        chosen, d = list(heads), self.d_head
        for name, _ in self.first_maps[0].named_parameters():
            rows = torch.cat([t[chosen].flatten(0, 1) for t in old._by_head(name)])
            own = [each.get_parameter(name) for each in self.first_maps]
            for weight, part in zip(own, rows.split([len(w) for w in own]), strict=True):
                weight.copy_(part)
        self.out_proj.weight.copy_(old.out_proj.weight.unflatten(1, (-1, d))[:, chosen].flatten(1))
        taken = {*self.first_maps, self.out_proj}
        for name, weight in self.named_parameters():
            if name == "out_proj.bias" or self.get_submodule(name.rpartition(".")[0]) not in taken:
                its = old.get_parameter(name)
                weight.copy_(its[chosen] if name in self.per_head else its)


@dataclass(frozen=True, kw_only=True)
class Linear(Choice):
    """All frequencies are divided by ``factor``: see :class:`stateline.ops.positions.RopeScaling`.

    Attributes:
        factor: The divisor.
    """

    owner = "linear"
    factor: Positive = 1.0

    def scaling(self) -> RopeScaling:
        """The rule."""
        return RopeScaling("linear", self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3(Choice):
    """Low frequencies are divided: see :class:`stateline.ops.positions.RopeScaling`.

    Attributes:
        factor: The divisor.
        low: Frequencies with fewer turns than this in ``original_len`` are divided by it.
        high: Frequencies with more turns than this stay as they are.
        original_len: Length of the inputs in pretraining.
    """

    owner = "llama3"
    factor: Positive = 1.0
    low: float = 1.0
    high: float = 4.0
    original_len: Count = 8192

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise InputError(f"llama3 needs 0 < low < high, got {self.low} and {self.high}")

    def scaling(self) -> RopeScaling:
        """The rule."""
        return RopeScaling("llama3", self.factor, self.low, self.high, self.original_len)


@dataclass(frozen=True, kw_only=True)
class Yarn(Choice):
    r"""YaRN: see :class:`stateline.ops.positions.RopeScaling`.

    Attributes:
        factor: What frequencies are divided by.
        slow: Turns in ``original_len`` up to which frequencies are divided by the whole factor.
        fast: Turns from which they stay as they are.
        original_len: Length of the inputs in pretraining.
        attention_factor: Factor of rotated queries and keys; by default :math:`0.1 \ln s + 1` with
            s = ``factor``.
        truncate: Whether the pairs at both limits are whole numbers.
    """

    owner = "yarn"
    factor: Positive = 1.0
    slow: float = 1.0
    fast: float = 32.0
    original_len: Count = 8192
    attention_factor: Positive | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.slow < self.fast:
            raise InputError(f"yarn needs 0 < slow < fast, got {self.slow} and {self.fast}")

    def scaling(self) -> RopeScaling:
        """The rule."""
        size = self.attention_factor
        limits = self.slow, self.fast, self.original_len
        return RopeScaling("yarn", self.factor, *limits, size, self.truncate)


@dataclass(frozen=True, kw_only=True)
class Rope(Choice):
    r"""Rotary positions: see :func:`stateline.ops.positions.rotate`.

    Attributes:
        base: Base b of the angles: of r rotated entries, pair t turns by :math:`b^{-2t/r}` per
            token.
        fraction: Fraction of each head's entries that is rotated, rounded down to pairs; with 1,
            the width of a head must be even.
        scaling: How frequencies are lowered for inputs longer than in pretraining: ``none``,
            ``linear``, ``llama3`` or ``yarn``.
    """

    owner = "rope"
    base: Positive = 10_000.0
    fraction: Positive = 1.0
    scaling: Literal["none"] | Linear | Llama3 | Yarn = "none"

    def __post_init__(self) -> None:
        if isinstance(self.scaling, Yarn) and self.base <= 1:
            raise InputError(f"yarn needs a base above 1, got {self.base}")

    def rotary(self, d_head: int) -> Rotary:
        """The rotation of heads of a width."""
        dims = int(d_head * self.fraction) // 2 * 2
        if not 2 <= dims <= d_head:
            raise InputError(
                "rope rotates pairs of entries: fraction * d_head must be from 2 to d_head, got "
                f"fraction={self.fraction} and {d_head=}"
            )
        if self.fraction == 1 and d_head % 2:
            raise InputError(
                f"rope rotates pairs of entries: the width of a head must be even, got {d_head}: "
                "give d_head, or fraction below 1"
            )
        return Rotary(dims, self.base, None if self.scaling == "none" else self.scaling.scaling())


PLAIN_ROPE = Rope()


@dataclass(frozen=True, kw_only=True)
class HeadNorm(Choice):
    """A norm of queries and keys.

    Attributes:
        eps: Added to the mean square.
    """

    eps: NotNegative = 1e-6


class Rms(HeadNorm):
    """Each query and key is divided by its root mean square, and has a learned weight per entry."""

    owner = "rms"

    def norm(self, n_heads: int, d_head: int) -> nn.Module:  # noqa: ARG002
        """The norm of heads."""
        return RMSNorm(d_head, eps=self.eps)


class Offset(HeadNorm):
    """As :class:`Rms`, with weights that are stored as offsets from one."""

    owner = "offset"

    def norm(self, n_heads: int, d_head: int) -> nn.Module:  # noqa: ARG002
        """The norm of heads."""
        return OffsetRMSNorm(d_head, eps=self.eps)


class Joint(HeadNorm):
    """As :class:`Rms`, for all heads of queries, or of keys, together."""

    owner = "joint"

    def norm(self, n_heads: int, d_head: int) -> nn.Module:
        """The norm of heads."""
        return RMSNorm(n_heads * d_head, eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class HeadSettings(Settings):
    r"""Settings that all kinds of attention share.

    Attributes:
        n_heads: Number of heads; must divide ``d_model`` unless ``d_head`` is given.
        n_kv_heads: Number of heads of keys and values, which must divide ``n_heads``; by default
            the same. Groups of consecutive heads share them (grouped queries), and the state is
            smaller by that factor.
        d_head: Width of a head; by default ``d_model / n_heads``.
        position: Position scheme: see the layer.
        score_scale: Factor of the scores in place of :math:`1 / \sqrt d`.
        soft_cap: If set, scores x become :math:`c \tanh(x / c)` for this c, as in Gemma 2.
        bias: Whether the projections have biases: all, none, only the projections of queries, keys
            and values (``qkv``), or only the last one (``out``).
        dropout: Probability that an attention weight is dropped in training.
    """

    n_heads: Count = 4
    n_kv_heads: Count | None = None
    d_head: Count | None = None
    position: Any = "none"
    score_scale: float | None = None
    soft_cap: Positive | None = None
    bias: Biases = False
    dropout: Fraction = 0.0

    def sizes(self, d_model: int) -> tuple[int, int]:
        """Number of heads of keys and values, and width of a head; see :func:`head_sizes`."""
        return head_sizes(d_model, self.n_heads, self.n_kv_heads, self.d_head)

    def has_bias(self, part: Literal["qkv", "out"]) -> bool:
        """Whether a projection has a bias."""
        return self.bias in (True, part)

    def rotary(self, d_head: int) -> Rotary | None:
        """Rotary positions, for ``rope``."""
        return self.position.rotary(d_head) if isinstance(self.position, Rope) else None


def scaled(
    q: Float[Tensor, "*batch d_head"], score_scale: float | None, rotary: Rotary | None = None
) -> Tensor:
    """Queries scaled so that scores get ``score_scale`` instead of the op's 1 / sqrt(d_head).

    Entries that ``rotary`` rotates also get its factor of the scores.
    """
    q = q if score_scale is None else q * (score_scale * q.shape[-1] ** 0.5)
    if rotary is None or rotary.scaling is None or rotary.scaling.score_factor == 1:
        return q
    turned, plain = q.tensor_split([rotary.dims], dim=-1)
    return torch.cat([rotary.scaling.score_factor * turned, plain], dim=-1)
