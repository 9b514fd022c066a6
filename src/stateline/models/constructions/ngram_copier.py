"""A transformer that copies by looking up what followed the last n letters."""

import math
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.layers import Attention, FeedForward, Residual
from stateline.models.config import ModelConfig
from stateline.models.constructions.zero_model import blank_model, places
from stateline.models.language_model import LanguageModel
from stateline.settings import at_least

BOS, SEP = 0, 1
"""Coordinates of a code that belong to the special tokens."""


def ngram_copier(n: int = 5, *, n_letters: int = 26, longest: int = 1000) -> LanguageModel:
    r"""Two attention layers that copy every string in which no n letters occur twice.

    Heads that see 1, ..., n + 1 tokens compute the means :math:`h_s` of the codes of the last s
    tokens; the token t steps back is :math:`(t + 1) h_{t+1} - t h_t`. A feed-forward writes at each
    position a *key*, the n tokens before it, and a *query*, the last n tokens including it. Near
    BOS and SEP, where fewer than n letters precede, key and query encode the position instead. The
    second layer has one head: the position whose key equals the query holds the next letter.

    The error on random strings is the probability that n letters occur twice in a string, at most
    :math:`\binom{L - n + 1}{2} D^{-n}` for D equally likely letters. The width grows as n log D and
    does not depend on the length L. A string must have at least n letters.

    Args:
        n: Number of letters that are looked up.
        n_letters: D.
        longest: Length up to which the proof holds; it determines the scale of the last softmax.

    Returns:
        A model with the vocabulary of the task ``copying``, in evaluation mode. Its residual
        connections and norms do not change what the layers compute.

    Raises:
        InputError: If a size is below one.

    Example:
        >>> from stateline.evaluate import evaluate
        >>> from stateline.tasks import Copying
        >>> evaluate(ngram_copier(), Copying(), 60, batches=1)["string_accuracy"]
        1.0

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, theorem 2.3 and appendix C.
    """
    at_least(1, n=n, n_letters=n_letters, longest=longest)
    codes = token_codes(n_letters)
    d_code = codes.shape[1]
    token, means, keys, queries, found = places(
        d_code, (n + 1) * d_code, n * (d_code + 1), n * (d_code + 1), d_code
    )
    width = -(-found.stop // (n + 1)) * (n + 1)  # a multiple of the number of heads
    pattern = f"attention(n_heads={n + 1}, position=hard_alibi(masked_heads={n + 1})) "
    config = ModelConfig(
        pattern + "attention(n_heads=1)",
        vocab_size=n_letters + 4,
        d_model=width,
        norm="rms",
        feed_forward="relu",
        tie_embeddings=False,
    )
    model = blank_model(config)
    windows, table, lookup, _ = (cast("Residual", link).layer for link in model.stack.links)
    with torch.no_grad():
        model.embedding.weight[: n_letters + 2, token] = codes
        assert model.head is not None
        model.head.weight[: n_letters + 2, found] = codes
        _average(cast("Attention", windows), token, means)
        _make_keys(cast("FeedForward", table), means, keys, queries, n)
        bits = d_code - 2
        sharpness = bits / 2 * math.log(4 * (2 * longest + 2) * bits)
        _look_up(cast("Attention", lookup), token, keys, queries, found, sharpness)
    return model


def token_codes(n_letters: int) -> Float[Tensor, "token d_code"]:
    """Codes of the letters, BOS and SEP: distinct unit vectors.

    The code of a letter is its index in binary, with signs as digits; it is zero in the coordinates
    of BOS and SEP.

    Example:
        >>> token_codes(2)
        tensor([[ 0.,  0., -1.],
                [ 0.,  0.,  1.],
                [ 1.,  0.,  0.],
                [ 0.,  1.,  0.]])
    """
    bits = max(1, (n_letters - 1).bit_length())
    digits = torch.arange(n_letters)[:, None] >> torch.arange(bits) & 1
    codes = torch.zeros(n_letters + 2, bits + 2)
    codes[:n_letters, 2:] = (2 * digits - 1) / bits**0.5
    codes[[n_letters, n_letters + 1], [BOS, SEP]] = 1
    return codes


def _average(layer: Attention, token: slice, means: slice) -> None:
    """Head s outputs the mean code of the last s tokens, because all its scores are zero."""
    d_code = token.stop - token.start
    values = layer.qkv.weight[2 * layer.d_model :].unflatten(0, (layer.n_heads, layer.d_head))
    values[:, :d_code, token] = torch.eye(d_code)
    heads = layer.out_proj.weight.unflatten(1, (layer.n_heads, layer.d_head))
    for head, mean in enumerate(heads[means].split(d_code)):
        mean[:, head, :d_code] = torch.eye(d_code)


def _make_keys(layer: FeedForward, means: slice, keys: slice, queries: slice, n: int) -> None:
    """Write the key and the query of every position: n codes and n position entries each."""
    mean = torch.eye(layer.d_model)[means].unflatten(0, (n + 1, -1))  # (window, code, stream)
    windows = torch.arange(1, n + 2)[:, None, None]
    total = windows * mean
    back = torch.cat([total[:1], total[1:] - total[:-1]])  # the token t steps back, t = 0, ..., n
    # At least 1 if fewer than n letters precede; code entries are at most 1 in magnitude.
    near_bos = (n + 1) * mean[n, BOS]
    # 1 if SEP is among the last n tokens.
    near_sep = n * mean[n - 1, SEP]
    # 1 at the position t after BOS; before it, both means are over all tokens.
    after_bos = windows[1:, 0] * (mean[1:, BOS] - mean[:-1, BOS])
    after_sep = n * back[:n, SEP]  # outweighs any other match

    last, written = 0, torch.eye(layer.d_model)
    for codes, gate, place, target in (
        (back[1:], near_bos, after_bos, keys),
        (back[:n], near_sep, after_sep, queries),
    ):
        rows, columns = codes.flatten(0, 1), written[:, target]
        size = len(rows)
        # relu(x - gate) - relu(-x - gate) is x if gate = 0, and 0 if gate >= 1
        for units, effects in (
            (rows - gate, columns[:, :size]),
            (-rows - gate, -columns[:, :size]),
            (place, columns[:, size:]),
        ):
            layer.in_proj.weight[last : last + len(units)] = units
            layer.out_proj.weight[:, last : last + len(units)] = effects
            last += len(units)


def _look_up(
    layer: Attention, token: slice, keys: slice, queries: slice, found: slice, sharpness: float
) -> None:
    """Attend to the position whose key equals the query, and write the code of its token."""
    q, k, v = layer.qkv.weight.unflatten(0, (3, layer.d_model))
    size, d_code = keys.stop - keys.start, token.stop - token.start
    q[:size, queries] = sharpness * layer.d_head**0.5 * torch.eye(size)
    k[:size, keys] = torch.eye(size)
    v[:d_code, token] = torch.eye(d_code)
    layer.out_proj.weight[found, :d_code] = torch.eye(d_code)
