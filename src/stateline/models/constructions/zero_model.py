"""A language model with zero weights, as a start for constructions."""

from itertools import pairwise

import torch
from torch import nn

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

CARRIER = 2.0**20
"""Entry 0 of every embedding: so large that it alone determines the norm of a position."""


def places(*widths: int) -> list[slice]:
    """Consecutive slices of the residual stream, after the carrier.

    Example:
        >>> places(3, 2)
        [slice(1, 4, None), slice(4, 6, None)]
    """
    ends = [1]
    for width in widths:
        ends.append(ends[-1] + width)
    return [slice(start, stop) for start, stop in pairwise(ends)]


@torch.no_grad()
def blank_model(config: ModelConfig) -> LanguageModel:
    r"""A model whose weights are zero and whose norms have no effect.

    The root mean square of a position is :math:`\sqrt{(c^2 + |x|^2) / d_\mathrm{model}}`, where c
    is the carrier and x all other entries. The weights of the norms cancel it for x = 0. So norms
    map x to x, up to a factor within :math:`|x|^2 / c^2` of one, and the carrier to zero.

    Differs from the models of the papers, which have no residual connections and norms. A
    construction is a usual model, which streams, saves and decodes.

    Args:
        config: With ``norm="rms"``, and without tied embeddings.

    Returns:
        The model, in evaluation mode.
    """
    assert config.norm == "rms", "the carrier would shift the mean of a layer norm"
    assert not config.tie_embeddings, "the carrier would dominate the logits"
    model = LanguageModel(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight[1:] = CARRIER / config.d_model**0.5
    model.embedding.weight[:, 0] = CARRIER
    return model
