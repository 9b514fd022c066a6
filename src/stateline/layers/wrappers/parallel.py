"""Mixers side by side: groups of heads of different kinds, which share their input."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, require_same_width
from stateline.layers.compose import Composite, Stack
from stateline.layers.linear import Linear
from stateline.layers.norm import RMSNorm
from stateline.settings import NotNegative

Join = Literal["sum", "norm", "hymba", "adapter"]


class Parallel(Composite):
    r"""Layers side by side in one residual branch: groups of heads of different kinds.

    The output of n layers :math:`f_i` is joined by one of

    .. math::
        \begin{aligned}
        \text{sum:} \quad & y = \sum_i f_i(x) \\
        \text{norm:} \quad & y = \tfrac{1}{n} \sum_i w_i \odot \mathrm{norm}(f_i(x)) \\
        \text{hymba:} \quad & y = W \tfrac{1}{n} \sum_i w_i \odot \mathrm{norm}(f_i(x)) \\
        \text{adapter:} \quad & y = \tfrac{1}{n} \Bigl( f_1(x) + \sum_{i>1} W_i\,
        \bigl[ \mu_1 + \sigma_1 (f_i(x) - \mu_i) / \sigma_i \bigr] + b_i \Bigr)
        \end{aligned}

    The norm divides by the root mean square, and the learned weights :math:`w_i` begin at one;
    :math:`\mu_i` and :math:`\sigma_i` are mean and standard deviation of the entries of
    :math:`f_i(x)`.

    The sum is the last map of multi-head attention, cut into groups of heads: two of nine heads
    of attention beside seven of a recurrence are ``parallel(attention(n_heads=2, d_head=64),
    gated_delta_net(n_heads=7, d_key=64, expand_v=1))``. In a pattern, each argument is one of the
    layers. They are built without residual branches, and the wrapper stands in a block of its own.

    Args:
        core: A stack of the layers :math:`f_i`; any other layer stands alone.
        join: How the outputs are joined.
        keeps: In a model that starts from another, for attention in place of more heads of
            attention: the numbers of the heads that stay, from 0, such as ``"1 4"``; by default the
            first ones. A recurrence beside it begins with the others.
        norm_eps: Added to the mean square in the norm, and to the standard deviations.

    References:
        ``sum``: Zuo et al., "Falcon-H1", 2025, section 2.1; ``norm`` and ``hymba``: Dong et al.,
        "Hymba: A Hybrid-head Architecture for Small Language Models", ICLR 2025, section 2.1;
        ``adapter``: Bick et al., "Retrieval-Aware Distillation for Transformer-SSM Hybrids", 2026.
    """

    # Differs from Hymba, whose layers also share the projection of the input.

    is_mixer: ClassVar[bool] = True
    takes_several: ClassVar[bool] = True

    def __init__(
        self,
        core: AnyLayer,
        *,
        join: Join = "sum",
        keeps: str | int = "",
        norm_eps: NotNegative = 1e-6,
    ) -> None:
        super().__init__(core.d_model)
        self.core = core if isinstance(core, Stack) else Stack(core)
        for layer in self.links:
            require_same_width(layer)
        self.join, self.norm_eps, self.causal = join, norm_eps, core.causal
        self.keeps = [int(word) for word in str(keeps).split() if word.isdecimal()]
        if len({*self.keeps}) != len(str(keeps).split()):
            raise InputError(f'keeps must be different numbers, such as "1 4", got {keeps!r:.60}')
        width, count = core.d_model, len(self.links)
        normed = count if join in ("norm", "hymba") else 0
        self.norms = nn.ModuleList(RMSNorm(width, eps=norm_eps) for _ in range(normed))
        adapted = count - 1 if join == "adapter" else 0
        self.adapters = nn.ModuleList(Linear(width, width) for _ in range(adapted))
        self.out_proj = Linear(width, width, bias=False) if join == "hymba" else None

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The layers."""
        return self.core.links

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """The joined outputs."""
        outputs = [call(layer, x) for layer in self.links]
        if self.join == "sum":
            return sum(outputs[1:], start=outputs[0])
        if self.join == "adapter":
            pairs = zip(self.adapters, outputs[1:], strict=True)
            adapted = [adapt(self._like(outputs[0], y)) for adapt, y in pairs]
            return torch.stack([outputs[0], *adapted]).mean(dim=0)
        pairs = zip(self.norms, outputs, strict=True)
        y = torch.stack([norm(y) for norm, y in pairs]).mean(dim=0)
        return y if self.out_proj is None else self.out_proj(y)

    def _like(self, first: Tensor, y: Tensor) -> Tensor:
        """An output with the mean and the deviation of the first one."""
        (std, mean), (own_std, own_mean) = (torch.std_mean(t, -1, keepdim=True) for t in (first, y))
        return mean + (std + self.norm_eps) * (y - own_mean) / (own_std + self.norm_eps)
