"""Whether a layer may use the weights of a linear map without calling the map."""

from typing import TypeGuard

from torch import nn

from stateline.layers.decoder import kind_of
from stateline.layers.linear import Linear


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a map is ``nn.Linear``, and nothing watches or changes what it computes.

    Adapters replace the module, tools that place or watch weights add hooks or another ``forward``.
    """
    hooks = (
        linear._forward_pre_hooks,
        linear._forward_hooks,
        linear._backward_pre_hooks,
        linear._backward_hooks,
    )
    changed = any(hooks) or "forward" in vars(linear)
    return kind_of(linear) in (nn.Linear, Linear) and not changed


def is_plain_with_bias(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a map is plain, see :func:`is_plain`, and has a bias."""
    return is_plain(linear) and linear.bias is not None
