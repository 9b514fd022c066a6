"""The definition of the LSTM: its recurrence."""

import torch
from torch import Tensor


def lstm(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the recurrence to one input after the other."""
    outputs = []
    for x_t in x.unbind(dim=1):
        i, f, g, o = (x_t @ w_ih.T + b_ih + h @ w_hh.T + b_hh).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    y = torch.stack(outputs, dim=1) if outputs else x.new_zeros(len(x), 0, h.shape[1])
    return y, h, c
