"""The H3 layer that solves associative recall."""

from typing import cast

import torch

from stateline.layers import H3, Residual
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

N_KEYS = 4
"""Keys, and values, of the language; each key has a head of its own."""


def recall_h3() -> LanguageModel:
    r"""One H3 layer that recalls which of four values came with a key.

    Key i is the basis vector e_i and value j is :math:`e_{4+j}`. Every key has a head of two
    channels, on which the shift SSM delays by one token and the diagonal SSM sums. Queries and keys
    are (1, 1) in the head of the key that stands there, and zero elsewhere; values are two signs,
    the binary number of the value, in every head. So head i adds up the value after every key i,
    and shows the sum where key i is asked for: a positive multiple of the value's signs, which the
    output map turns into the value.

    Exact for sequences of any length in which a key always comes with the same value.

    Returns:
        A model with the vocabulary of the task ``associative_recall``, in evaluation mode.

    Example:
        >>> from stateline.evaluate import evaluate
        >>> from stateline.tasks import AssociativeRecall
        >>> evaluate(recall_h3(), AssociativeRecall(), 200)
        {'accuracy': 1.0}

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, proposition 3 and appendix D.1.
    """
    config = ModelConfig(
        "h3(d_state=2, d_head=2)",
        vocab_size=2 * N_KEYS + 2,
        d_model=2 * N_KEYS,
        norm="rms",
        feed_forward="none",
    )
    model = LanguageModel(config).eval()
    block = cast("Residual", model.stack.links[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[1:-1] = torch.eye(config.d_model)  # neither "." nor "=>"
        for norm in (block.norm, model.norm):
            # Basis vectors stay basis vectors, up to the norm's epsilon.
            cast("torch.nn.RMSNorm", norm).weight.fill_(config.d_model**-0.5)
        _set_layer(cast("H3", block.layer))
    return model


def _set_layer(layer: H3) -> None:
    q, k, v = layer.qkv.weight.unflatten(0, (3, N_KEYS, 2))  # each (head, entry, d_model)
    head = torch.arange(N_KEYS)
    q[head, :, head] = k[head, :, head] = 1
    # Differs from a binary number of zeros and ones: with signs no threshold is needed, and it
    # does not matter how often a pair has occurred.
    signs = 2.0 * (head[:, None] >> torch.arange(2) & 1) - 1  # (value, entry)
    v[:, :, N_KEYS:] = signs.T
    layer.out_proj.weight.unflatten(1, (N_KEYS, 2))[N_KEYS:] = signs[:, None]

    layer.shift.b[:, 0] = 1
    layer.shift.c[:, 1] = 1  # y_t = u_{t-1}
    # A step of one and a decay that is zero in any precision: h_t = h_{t-1} + u_t.
    layer.diagonal.log_decay.fill_(-1e4)
    layer.diagonal.b[..., 0] = 1
    layer.diagonal.c[..., 0] = 0.5  # y = 2 Re(C h)
