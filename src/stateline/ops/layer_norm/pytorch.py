"""Layer normalisation by PyTorch's own function, on any device."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Call it."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)
