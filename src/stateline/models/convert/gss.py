"""The GSS layer, from the weights of lucidrains/gated-state-spaces-pytorch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stateline.models.convert.weights import rename

_NAMES = {
    "norm.weight": "norm.weight",
    "norm.bias": "norm.bias",
    "to_u.0.weight": "layer.gate.weight",
    "to_v.0.weight": "layer.narrow.weight",
    "dss.norm.weight": "layer.norm.weight",
    "dss.norm.bias": "layer.norm.bias",
    "dss.Lambda_real": "layer.ssm.log_decay",
    "dss.Lambda_imag": "layer.ssm.frequency",
    "dss.C_real": "real",
    "dss.C_imag": "imag",
    "dss.param_D": "layer.ssm.skip",
    "to_gate.weight": "layer.widen.weight",
    "to_out.weight": "layer.out_proj.weight",
    "to_out.bias": "layer.out_proj.bias",
}


def gss_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of a GSS layer in its residual branch, from an official block.

    Args:
        tensors: State dict of ``GSS`` in lucidrains/gated-state-spaces-pytorch.

    Returns:
        By our names, for ``Residual(GSS(...), LayerNorm)``.

    Raises:
        InputError: If tensors are missing or left over.
    """
    ours = rename(tensors, _NAMES)
    ours["layer.ssm.c"] = torch.stack([ours.pop("real"), ours.pop("imag")], dim=-1)
    return ours
