r"""Selective scan by mamba-ssm's ``selective_scan_fn``.

That function starts from the zero state, and no gradient comes back from the state that it
returns. So the state goes in and out as signals: N tokens before the sequence write it, one entry
each (:math:`B = e_n`), and N tokens after it read it (:math:`C = e_n`), all with a step so short
that nothing decays.
"""

from typing import Any

import torch
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from torch import Tensor

from stateline.ops import third_party
from stateline.ops.selective_scan import ScanSignals

MOST_STATES = 256
"""Largest state of a channel that the package's kernel takes."""

SHORTEST = 128
"""Minimum length at which the extra state tokens are negligible."""

STEP = 1e-10
"""Step of the tokens that carry the state: :math:`e^{\\Delta A}` is 1 in float32."""

available = third_party.no_device


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    x, a = inputs[:2]
    if a.shape[1] > MOST_STATES:
        return f"mamba-ssm takes up to {MOST_STATES} states of a channel"
    if x.u.shape[1] < SHORTEST:
        return f"for fewer than {SHORTEST} tokens another backend is faster"
    return third_party.can_use(third_party.SINGLE, *inputs)


def selective_scan(x: ScanSignals, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the package's kernel in float32, between the tokens that carry the state."""
    (batch, length, _), (groups, states) = x.u.shape, x.b.shape[2:]
    signal, step, enter, leave = (t.float() for t in x)
    unit = torch.eye(states, device=signal.device)[:, None].expand(batch, -1, groups, -1)
    held, short = state.float().mT / STEP, torch.full_like(state.mT, STEP, dtype=torch.float32)
    nothing = torch.zeros_like(held)
    signal = torch.cat([held, signal, nothing], dim=1).mT.contiguous()
    step = torch.cat([short, step, short], dim=1).mT.contiguous()
    silent = torch.zeros_like(unit)
    enter, leave = (
        torch.cat(parts, dim=1).permute(0, 2, 3, 1).contiguous()
        for parts in ((unit, enter, silent), (silent, leave, unit))
    )
    y = selective_scan_fn(signal, step, a.float(), enter, leave).mT
    after = y[:, states + length :].mT
    return y[:, states : states + length].to(x.u.dtype), after.to(state.dtype).contiguous()
