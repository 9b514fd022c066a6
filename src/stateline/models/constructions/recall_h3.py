"""An H3 layer that solves associative recall."""

from typing import cast

import torch

from stateline.layers import H3, Residual
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

N_KEYS = 4
"""Number of keys and of values; each key has its own head."""


def recall_h3() -> LanguageModel:
    r"""One H3 layer that recalls which of four values was paired with a key.

    Key i is the basis vector e_i and value j is :math:`e_{4+j}`. Each key has a head of two
    channels: the shift SSM delays by one token, and the diagonal SSM sums. At key i, queries and
    keys are (1, 1) in head i and zero in the others. Values are two signs, the binary index of the
    value, in every head. So head i sums the values that follow key i, and outputs the sum when key
    i is queried: a positive multiple of the signs of the value, which the output map decodes.

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
        model.embedding.weight[1:-1] = torch.eye(config.d_model)  # all tokens but "." and "=>"
        for norm in (block.norm, model.norm):
            # The norm maps basis vectors to themselves, up to its epsilon.
            cast("torch.nn.RMSNorm", norm).weight.fill_(config.d_model**-0.5)
        _set_layer(cast("H3", block.layer))
    return model


def _set_layer(layer: H3) -> None:
    q, k, v = layer.qkv.weight.unflatten(0, (3, N_KEYS, 2))  # each (head, entry, d_model)
    head = torch.arange(N_KEYS)
    q[head, :, head] = k[head, :, head] = 1
    # Differs from the paper's digits 0 and 1: signs need no threshold, and repeated pairs do not
    # change them.
    signs = 2.0 * (head[:, None] >> torch.arange(2) & 1) - 1  # (value, entry)
    v[:, :, N_KEYS:] = signs.T
    layer.out_proj.weight.unflatten(1, (N_KEYS, 2))[N_KEYS:] = signs[:, None]

    layer.shift.b[:, 0] = 1
    layer.shift.c[:, 1] = 1  # y_t = u_{t-1}
    # Step size 1 and a decay that rounds to zero: h_t = h_{t-1} + u_t.
    layer.diagonal.log_decay.fill_(-1e4)
    layer.diagonal.b[..., 0] = 1
    layer.diagonal.c[..., 0] = 0.5  # y = 2 Re(C h)
