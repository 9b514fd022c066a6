"""sLSTM by PyTorch's functions, one token after the other, with its own backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.slstm import SLSTMCell


def _run(gates: Tensor, weight: Tensor, state: SLSTMCell) -> tuple[Tensor, Tensor]:
    """States (5, batch, head, d_head) of h, c, n and m, and the derivatives' parts, of each token.

    The first entry of both is what was before the first token.
    """
    h, c, n, m = state
    gates, weight = gates.to(h.dtype), weight.to(h.dtype).flatten(2)
    states = [torch.stack(state)]
    parts = [h.new_zeros(5, *h.shape)]
    for x in gates.unbind(dim=1):
        recurrent = torch.einsum("bhj,hjk->bhk", h, weight).unflatten(-1, (4, -1))
        i, f, z, o = (x + recurrent.transpose(1, 2)).unbind(dim=1)
        kept = F.logsigmoid(f) + m
        m = torch.maximum(kept, i)
        keep, write, z, o = (kept - m).exp(), (i - m).exp(), z.tanh(), o.sigmoid()
        c, n = keep * c + write * z, keep * n + write
        h = o * c / n
        states.append(torch.stack((h, c, n, m)))
        parts.append(torch.stack((write, keep, z, o, torch.sigmoid(-f))))
    return torch.stack(states), torch.stack(parts)


def _forward(gates: Tensor, weight: Tensor, state: SLSTMCell) -> tuple[Tensor, SLSTMCell]:
    states, _ = _run(gates, weight, state)
    y = states[1:, 0].transpose(0, 1).to(gates.dtype, copy=True)
    return y.contiguous(), SLSTMCell(*(last.clone() for last in states[-1]))


def _backward(
    grad: Tensor, grad_after: SLSTMCell, gates: Tensor, weight: Tensor, state: SLSTMCell
) -> Any:
    """Recompute the gates, and backpropagate through time; scales are constants."""
    states, parts = _run(gates, weight, state)
    (h, c, n, _), (grad_h, grad_c, grad_n, _) = state, grad_after
    matrices = weight.to(h.dtype).flatten(2)
    grad_gates = torch.zeros_like(gates, dtype=h.dtype)
    for t in reversed(range(gates.shape[1])):
        _, c_t, n_t, _ = states[t + 1].unbind()
        _, c_before, n_before, _ = states[t].unbind()
        write, keep, z, o, forgotten = parts[t + 1].unbind()
        grad_h = grad_h + grad[:, t]
        ratio = c_t / n_t
        grad_c = grad_c + grad_h * o / n_t
        grad_n = grad_n - grad_h * o * ratio / n_t
        grad_gates[:, t, 0] = (grad_c * z + grad_n) * write
        grad_gates[:, t, 1] = (grad_c * c_before + grad_n * n_before) * keep * forgotten
        grad_gates[:, t, 2] = grad_c * write * (1 - z.square())
        grad_gates[:, t, 3] = grad_h * ratio * o * (1 - o)
        grad_c, grad_n = grad_c * keep, grad_n * keep
        grad_h = torch.einsum("bhk,hjk->bhj", grad_gates[:, t].transpose(1, 2).flatten(2), matrices)
    grad_weight = torch.einsum("tbhj,btghe->hjge", states[:-1, 0], grad_gates)
    return grad_gates, grad_weight, SLSTMCell(grad_h, grad_c, grad_n, grad_c * c + grad_n * n)


def empty_outputs(gates: Tensor, _: Tensor, state: SLSTMCell) -> tuple[Tensor, SLSTMCell]:
    """Outputs without data, for a captured graph."""
    y, *after = empty_like(gates[:, :, 0], *state)
    return y, SLSTMCell(*after)


slstm = KernelOp("slstm", _forward, _backward, empty_outputs)
