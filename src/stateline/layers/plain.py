"""Whether a layer may use the weights of a linear map without calling the map."""

from typing import TypeGuard

from torch import nn

from stateline.layers.linear import Linear


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a map is ``nn.Linear`` with a bias, and nothing watches or changes what it computes.

    Adapters replace the module, tools that place or watch weights add hooks or another ``forward``.
    """
    hooks = (
        linear._forward_pre_hooks,
        linear._forward_hooks,
        linear._backward_pre_hooks,
        linear._backward_hooks,
    )
    changed = any(hooks) or "forward" in vars(linear)
    return type(linear) in (nn.Linear, Linear) and linear.bias is not None and not changed
