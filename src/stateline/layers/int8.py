"""Models whose large matrices are integers of 8 bits, for decoding."""

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.decoder import kind_of
from stateline.layers.linear import Linear, ScaledLinear
from stateline.ops.int8_linear import GROUP, Int8Weight, from_int8, int8_linear, to_int8


class Int8Linear(Linear):
    """A linear map whose weight is kept as integers, see :func:`stateline.ops.int8_linear`.

    Args:
        weight: The weight, in whose dtype :attr:`weight` is given back.
        bias: The bias.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        codes, scales = to_int8(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rounded weight, which is made anew each time."""
        return self.rows(slice(None))

    def rows(self, chosen: Any) -> Tensor:
        """Rows of the weight."""
        return from_int8(Int8Weight(self.codes[chosen], self.scales[chosen])).to(self.dtype)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis."""
        return int8_linear(x, Int8Weight(self.codes, self.scales), self.bias)


class Int8Embedding(nn.Embedding):
    """A table of embeddings that are rows of an :class:`Int8Linear`, which may be the head, too."""

    def __init__(self, table: Int8Linear) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = table.out_features, table.in_features
        self.table = table

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rounded table, which is made anew each time."""
        return self.table.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens."""
        return self.table.rows(tokens)


def to_int8_(module: nn.Module) -> None:
    """Round the weights of the linear maps inside, in place, for use without training.

    Maps with fewer than 64 inputs or outputs stay as they are: they are gates and routers, small
    and sensitive. So do weights that are no linear maps (convolutions, experts, transitions), and
    maps that a layer says to need in full.
    """
    in_full = getattr(module, "in_full", ())
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear) or kind_of(child) not in _KINDS:
            to_int8_(child)
        elif name not in in_full and min(child.weight.shape) >= GROUP:
            setattr(module, name, _rounded(child))


_KINDS = (nn.Linear, Linear, ScaledLinear)
"""Maps that compute nothing but what they say; adapters and other subclasses stay."""


def _rounded(linear: nn.Linear) -> Int8Linear:
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    if isinstance(linear, ScaledLinear):
        widths, factors = zip(*linear.factors, strict=True)
        factor = weight.new_tensor(factors).repeat_interleave(weight.new_tensor(widths).long())
        weight, bias = weight * factor[:, None], None if bias is None else bias * factor
    return Int8Linear(weight, bias)


def is_rounded(module: nn.Module) -> bool:
    """Whether weights inside were rounded."""
    return any(isinstance(part, Int8Linear) for part in module.modules())
