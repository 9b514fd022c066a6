"""The definition of the LSTM: its recurrence."""

import torch
from torch import Tensor

from stateline.ops.lstm import LSTMCell, LSTMWeights


def lstm(x: Tensor, weights: LSTMWeights, state: LSTMCell) -> tuple[Tensor, LSTMCell]:
    """Apply the recurrence to one input after the other."""
    (w_ih, w_hh, b_ih, b_hh), (h, c), outputs = weights, state, []
    for x_t in x.unbind(dim=1):
        i, f, g, o = (x_t @ w_ih.T + b_ih + h @ w_hh.T + b_hh).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    y = torch.stack(outputs, dim=1) if outputs else x.new_zeros(len(x), 0, h.shape[1])
    return y, LSTMCell(h, c)
