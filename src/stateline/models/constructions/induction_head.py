"""Two attention layers that predict what followed the current token before."""

import math
from typing import cast

import torch

from stateline.layers import Attention, Residual
from stateline.models.config import ModelConfig
from stateline.models.constructions.zero_model import blank_model, places
from stateline.models.language_model import LanguageModel
from stateline.settings import at_least


def induction_head(vocab_size: int = 20, *, longest: int = 1000) -> LanguageModel:
    r"""The induction head: ... A B ... A is followed by B.

    The first layer writes the previous token beside each token: one head averages the last two
    tokens, another copies the current token, and the previous token is twice the average minus the
    current token. The second layer attends to the positions whose previous token equals the current
    token, and outputs the token found there.

    If the current token has occurred before, the output is the token that followed it most often
    (among other tokens than the current one, if there are any). At the first position, the previous
    token is taken to be the token itself, because the head sees nothing else; so a position whose
    own token equals the current one has half the score.

    Args:
        vocab_size: Number of tokens.
        longest: Length up to which the proof holds; it determines the scale of the second softmax.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If a size is below one.

    Example:
        >>> model = induction_head(vocab_size=9)
        >>> model(torch.tensor([[4, 7, 3, 8, 4]]))[0, -1].argmax()
        tensor(7)

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, appendix D.2, after Olsson et al., "In-context
        Learning and Induction Heads", 2022. Differs from the sketch there: windows instead of
        position embeddings find the previous token, so that the length is not limited.
    """
    at_least(1, vocab_size=vocab_size, longest=longest)
    token, previous, found = places(vocab_size, vocab_size, vocab_size)
    config = ModelConfig(
        "attention(n_heads=2, position=hard_alibi(masked_heads=2)) attention(n_heads=1)",
        vocab_size=vocab_size,
        d_model=found.stop + found.stop % 2,
        norm="rms",
        feed_forward="none",
        tie_embeddings=False,
    )
    model = blank_model(config)
    windows, lookup = (
        cast("Attention", cast("Residual", link).layer) for link in model.stack.links
    )
    one_hot = torch.eye(vocab_size)
    with torch.no_grad():
        model.embedding.weight[:, token] = one_hot
        assert model.head is not None
        model.head.weight[:, found] = one_hot

        values = windows.qkv.weight[2 * config.d_model :].unflatten(0, (2, windows.d_head))
        values[:, :vocab_size, token] = one_hot
        heads = windows.out_proj.weight[previous].unflatten(1, (2, windows.d_head))
        heads[:, 0, :vocab_size] = -one_hot
        heads[:, 1, :vocab_size] = 2 * one_hot

        q, k, v = lookup.qkv.weight.unflatten(0, (3, config.d_model))
        # Matches score at least 1/2 above all others, and get all but 1 / 4V of the weight.
        sharpness = 2 * math.log(4 * vocab_size * longest)
        q[:vocab_size, token] = sharpness * lookup.d_head**0.5 * one_hot
        k[:vocab_size, previous] = one_hot
        k[:vocab_size, token] = -one_hot / 2
        v[:vocab_size, token] = one_hot
        lookup.out_proj.weight[found, :vocab_size] = one_hot
    return model
