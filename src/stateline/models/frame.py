"""What models have in common around their layers: initial weights, and checks of what enters."""

from jaxtyping import Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers import Branch, SequenceLayer
from stateline.layers.base import values_at_hand


def initialise(model: nn.Module, d_model: int) -> None:
    r"""Draw linear maps and embeddings anew, by width and number of residual branches.

    Normal with :math:`\sigma = \sqrt{2 / (5\, d_\mathrm{model})}`, biases zero; the maps that end a
    residual branch are scaled down by the root of the number of branches. What else layers have
    keeps the initial values that they gave it.

    Args:
        model: Its parameters are changed.
        d_model: Width of the residual stream.
    """
    std = (2 / (5 * d_model)) ** 0.5
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    # Differs from official H3, which means to scale H3's output map, too, but misses its name.
    branches = max(1, sum(isinstance(module, Branch) for module in model.modules()))
    for name, parameter in model.named_parameters():
        if name.endswith("out_proj.weight"):
            nn.init.normal_(parameter, std=std / branches**0.5)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise InputError unless the tokens are integers of the vocabulary."""
    if tokens.is_floating_point():
        raise InputError(f"tokens must be integers, got {tokens.dtype}: pass token numbers")
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.numel() else (0, 0)
    if low < 0 or high >= vocab_size:
        raise InputError(f"tokens must be from 0 to {vocab_size - 1}, got {low} to {high}")


def bound(max_len: int | None, layers: nn.Module) -> int | None:
    """Most tokens of a sequence: what learned positions and all layers allow; ``None`` is any."""
    limits = [max_len, *(m.max_len for m in layers.modules() if isinstance(m, SequenceLayer))]
    return min((limit for limit in limits if limit is not None), default=None)


def check_length(limit: int | None, new: int, seen: Int[Tensor, " batch"] | None = None) -> None:
    """Raise InputError where ``new`` tokens go beyond what the model can take."""
    if limit is None or (seen is not None and not values_at_hand(seen)):
        return
    total = new + (0 if seen is None else int(seen.max()))
    if total > limit:
        raise InputError(
            f"the model was made for max_len={limit} tokens, got {total}; "
            "give it less, or train one with max_len=None"
        )
