"""Mixers side by side: they share their input, and their outputs are added."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from stateline.layers.base import AnyLayer, require_same_width
from stateline.layers.compose import Composite, Stack
from stateline.settings import NotNegative


class Parallel(Composite):
    r"""Layers side by side in one residual branch, as the heads of Falcon-H1 and Hymba.

    .. math::
        y = \sum_i f_i(x) \quad \text{or, normalised,} \quad
        y = \frac{1}{n} \sum_i w_i \odot \mathrm{norm}(f_i(x))

    The norm divides by the root mean square, and the learned weights :math:`w_i` begin at one. In a
    pattern, each argument is one of the layers, ``parallel(attention, mamba2)``. They are built
    without residual branches, and the wrapper stands in a block of its own.

    Args:
        core: A stack of the layers :math:`f_i`; any other layer stands alone.
        normalise: Whether the outputs are normalised and averaged.
        norm_eps: Added to the mean square in the norm.

    References:
        Zuo et al., "Falcon-H1", 2025, section 2.1; ``normalise``: Dong et al., "Hymba: A
        Hybrid-head Architecture for Small Language Models", ICLR 2025, section 2.1.
    """

    # Differs from Hymba, whose layers also share the projection of the input.

    is_mixer: ClassVar[bool] = True
    takes_several: ClassVar[bool] = True

    def __init__(
        self, core: AnyLayer, *, normalise: bool = False, norm_eps: NotNegative = 1e-6
    ) -> None:
        super().__init__(core.d_model)
        self.core = core if isinstance(core, Stack) else Stack(core)
        for layer in self.links:
            require_same_width(layer)
        self.normalise, self.norm_eps, self.causal = normalise, norm_eps, core.causal
        norms = [nn.RMSNorm(core.d_model, eps=norm_eps) for _ in self.links] if normalise else []
        self.norms = nn.ModuleList(norms)

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The layers."""
        return self.core.links

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """The sum of the outputs, or the mean of the normalised ones."""
        outputs = [call(layer, x) for layer in self.links]
        if self.normalise:
            pairs = zip(self.norms, outputs, strict=True)
            return torch.stack([norm(y) for norm, y in pairs]).mean(dim=0)
        return sum(outputs[1:], start=outputs[0])
