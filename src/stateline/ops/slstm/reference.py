"""The definition of the sLSTM: its recurrence."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.slstm import SLSTMCell


def slstm(gates: Tensor, weight: Tensor, state: SLSTMCell) -> tuple[Tensor, SLSTMCell]:
    """Apply the recurrence to one input after the other."""
    (h, c, n, m), outputs = state, []
    for x in gates.to(h.dtype).unbind(dim=1):
        i, f, z, o = (x + torch.einsum("bhj,hjge->bghe", h, weight.to(h.dtype))).unbind(dim=1)
        scale = torch.maximum(F.logsigmoid(f) + m, i).detach()
        keep, write = torch.exp(F.logsigmoid(f) + m - scale), torch.exp(i - scale)
        c, n, m = keep * c + write * z.tanh(), keep * n + write, scale
        h = o.sigmoid() * c / n
        outputs.append(h)
    y = torch.stack(outputs, dim=1) if outputs else gates.new_zeros(len(gates), 0, *h.shape[1:])
    return y.to(gates.dtype), SLSTMCell(h, c, n, m)
