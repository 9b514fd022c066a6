"""LSTM by PyTorch's kernel; under ``torch.compile``, which cannot trace it, by an operator."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp
from stateline.ops.lstm import LSTMCell, LSTMWeights


def lstm(x: Tensor, weights: LSTMWeights, state: LSTMCell) -> tuple[Tensor, LSTMCell]:
    """Run the fused kernel, which does not accept empty sequences."""
    h, c = state
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 0, h.shape[1]), LSTMCell(h.clone(), c.clone())
    if torch.compiler.is_compiling():
        outputs, cells = _traceable_lstm(x, weights, state).unbind(dim=0)
        return outputs, LSTMCell(outputs[:, -1], cells[:, -1])
    y, h, c = torch.lstm(
        x,
        (h[None].contiguous(), c[None].contiguous()),  # which cuDNN wants
        tuple(weights),
        has_biases=True,
        num_layers=1,
        dropout=0.0,
        train=torch.is_grad_enabled(),
        bidirectional=False,
        batch_first=True,
    )
    return y, LSTMCell(h[0], c[0])


def _forward(x: Tensor, weights: LSTMWeights, state: LSTMCell) -> Tensor:
    """All outputs and all cells: (2, batch, length, d_hidden)."""
    return _run(x, weights, state)[0]


def _run(x: Tensor, weights: LSTMWeights, state: LSTMCell) -> tuple[Tensor, Tensor]:
    """Outputs and cells as in ``_forward``, and the gates (batch, length, 4, d_hidden)."""
    (w_ih, w_hh, b_ih, b_hh), (h, c) = weights, state
    from_input = x @ w_ih.T + (b_ih + b_hh)
    history, all_gates = [], []
    for t in range(x.shape[1]):
        gates = torch.addmm(from_input[:, t], h, w_hh.T).unflatten(-1, (4, -1))
        i, f, o = gates[:, [0, 1, 3]].sigmoid().unbind(dim=1)
        g = gates[:, 2].tanh()
        c = f * c + i * g
        h = o * c.tanh()
        history.append(torch.stack([h, c]))
        all_gates.append(torch.stack([i, f, g, o], dim=1))
    return torch.stack(history, dim=2), torch.stack(all_gates, dim=1)


def _backward(grad: Tensor, x: Tensor, weights: LSTMWeights, state: LSTMCell) -> Any:
    """Recompute the gates, and backpropagate through time."""
    (w_ih, w_hh, *_), (h, c) = weights, state
    history, gates = _run(x, weights, state)
    before = torch.cat([torch.stack([h, c])[:, :, None], history[:, :, :-1]], dim=2)
    grad_h, grad_c = torch.zeros_like(h), torch.zeros_like(c)
    grad_gates = torch.empty_like(gates)
    for t in reversed(range(x.shape[1])):
        i, f, g, o = gates[:, t].unbind(dim=1)
        squashed = history[1, :, t].tanh()
        grad_h = grad_h + grad[0, :, t]
        grad_c = grad_c + grad[1, :, t] + grad_h * o * (1 - squashed.square())
        grad_gates[:, t, 0] = grad_c * g * i * (1 - i)
        grad_gates[:, t, 1] = grad_c * before[1, :, t] * f * (1 - f)
        grad_gates[:, t, 2] = grad_c * i * (1 - g.square())
        grad_gates[:, t, 3] = grad_h * squashed * o * (1 - o)
        grad_c = grad_c * f
        grad_h = grad_gates[:, t].flatten(1) @ w_hh
    flat = grad_gates.flatten(2)  # (batch, length, gates)
    of_w_ih, of_w_hh = (torch.einsum("btg,btd->gd", flat, y) for y in (x, before[0]))
    bias = flat.sum(dim=(0, 1))
    of_weights = LSTMWeights(of_w_ih, of_w_hh, bias, bias.clone())
    return flat @ w_ih, of_weights, LSTMCell(grad_h, grad_c)


def _fake(x: Tensor, _: LSTMWeights, state: LSTMCell) -> Tensor:
    return state.h.new_empty(2, *x.shape[:2], state.h.shape[1])


_traceable_lstm = KernelOp("lstm", _forward, _backward, _fake)
