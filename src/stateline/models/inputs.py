"""Checks of the inputs of whole models."""

from logging import getLogger

import torch
from jaxtyping import Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers import SequenceLayer
from stateline.layers.state import shown
from stateline.models.config import ModelConfig
from stateline.ops.kernel_op import values_at_hand

log = getLogger("stateline.models")


def check_axes(tokens: object, *axes: str, width: int | None = None) -> None:
    """Raise InputError unless the tokens are a tensor with these axes, the last of this width."""
    fits = isinstance(tokens, Tensor) and tokens.ndim == len(axes)
    if not fits or tokens.shape[-1] != (width or tokens.shape[-1]):  # type: ignore[attr-defined]
        what, size = ("tokens", "") if width is None else ("embeddings", f"={width}")
        wanted = f"a tensor of shape ({', '.join(axes)}{size})"
        raise InputError(f"{what} must be {wanted}, got {shown(tokens)}: give them these axes")


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise InputError unless the tokens are int64 or int32, from 0 to ``vocab_size`` - 1."""
    if tokens.dtype not in (torch.int64, torch.int32):  # what embeddings take
        raise InputError(
            f"tokens must be integers, int64 or int32, got {tokens.dtype}: pass token numbers, "
            "after .long() if they are in another type"
        )
    low, high = map(int, tokens.aminmax()) if tokens.numel() else (0, 0)
    if low < 0 or high >= vocab_size:
        raise InputError(f"tokens must be from 0 to {vocab_size - 1}, got {low} to {high}")


def length_limit(max_len: int | None, layers: nn.Module) -> int | None:
    """Longest sequence that learned positions and all layers allow; ``None`` if any is allowed."""
    limits = [max_len, *(m.max_len for m in layers.modules() if isinstance(m, SequenceLayer))]
    return min((limit for limit in limits if limit is not None), default=None)


def warn_beyond_training(config: ModelConfig, length: int) -> None:
    """Log a warning if a text is longer than those that a published model was trained on."""
    if config.trained_len is not None and length > config.trained_len:
        log.warning(
            "the model was trained on texts of up to %s tokens, this one may have %s: what comes "
            "after may be wrong",
            f"{config.trained_len:,}",
            f"{length:,}",
        )


def check_length(limit: int | None, new: int, seen: Int[Tensor, " batch"] | None = None) -> None:
    """Raise InputError if ``new`` tokens after the ``seen`` ones exceed the limit."""
    if limit is None or (seen is not None and not values_at_hand(seen)):
        return
    total = new + (0 if seen is None else int(seen.max()))
    if total > limit:
        raise InputError(
            f"the model was made for max_len={limit} tokens, got {total}; "
            "shorten the input, or train a model with max_len=None"
        )
