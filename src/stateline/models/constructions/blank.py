"""What the constructions share: a language model with empty weights, and places in its stream."""

from itertools import pairwise

import torch
from torch import nn

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

CARRIER = 2.0**20
"""Entry 0 of every embedding: so large that the norm of a position hardly depends on the rest."""


def places(*widths: int) -> list[slice]:
    """Places in the residual stream, one after the other, after the carrier.

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
    r"""A model whose weights are zero and whose norms do nothing, ready to be given weights.

    The root mean square of a position is :math:`\sqrt{(c^2 + |x|^2) / d_\mathrm{model}}`, where c
    is the carrier and x all other entries. The norms' weights undo it for x = 0, so that they map
    x to x, up to a factor within :math:`|x|^2 / c^2` of one, and the carrier to zero.

    Differs from the papers' models, which have neither residual branches nor norms: with these
    switched off a construction is a model like any other, which streams, saves and decodes.

    Args:
        config: With ``norm="rms"``, and without tied embeddings.

    Returns:
        The model, in evaluation mode.
    """
    assert config.norm == "rms", "a carrier would move the mean of a layer norm"
    assert not config.tie_embeddings, "a carrier would swamp the logits"
    model = LanguageModel(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight[1:] = CARRIER / config.d_model**0.5
    model.embedding.weight[:, 0] = CARRIER
    return model
