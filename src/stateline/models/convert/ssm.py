"""S4, S4D, DSS and S5: tensors of their official code, by our names.

Each function maps the state dict of one official layer or kernel to the state dict of our layer.
Kernels do not contain the skip connection: add it as ``D``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.models.convert.weights import rename
from stateline.ops.dplr_ssm.pytorch import transition

_S4 = {"inv_dt": "log_dt", "A_real": "log_decay", "A_imag": "frequency", "B": "b"}
_H3 = {"log_dt": "log_dt", "inv_A_real": "log_decay", "A_imag": "frequency", "B": "b"}
_SAFARI = {"log_dt": "log_dt", "log_w_real": "log_decay", "w_imag": "frequency"}
_READOUT = {"C": "c", "D": "skip"}


def diagonal_ssm_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For :class:`~stateline.layers.DiagonalSSM`: a diagonal kernel of S4, H3 or safari.

    Args:
        tensors: ``A_real``, ``A_imag``, ``B``, ``C``, ``inv_dt`` (state-spaces/s4), or
            ``inv_A_real``, ``A_imag``, ``B``, ``C``, ``log_dt`` (HazyResearch/H3), or
            ``log_w_real``, ``w_imag``, ``C``, ``log_dt`` (safari, which has no B); and ``D``.

    Returns:
        By our names.

    Raises:
        InputError: If tensors are missing or left over.
    """
    if "A_real" in tensors:
        return _upper_half(rename(tensors, _S4 | _READOUT))
    if "inv_A_real" in tensors:
        return _per_output(rename(tensors, _H3 | _READOUT))
    ours = _per_output(rename(tensors, _SAFARI | _READOUT))
    one = torch.tensor([1.0, 0.0], dtype=ours["c"].dtype)
    return {**ours, "b": one.repeat(*ours["frequency"].shape, 1)}


def s4d_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For :class:`~stateline.layers.S4D`: the S4D layer of safari.

    Args:
        tensors: ``D``, ``output_linear.weight`` and ``.bias``, and the tensors of the kernel,
            which begin with ``kernel.kernel.``.

    Returns:
        By our names.

    Raises:
        InputError: If tensors are missing or left over.
    """
    inner = {n.removeprefix("kernel.kernel."): t for n, t in tensors.items() if "output" not in n}
    outer = {name: t for name, t in tensors.items() if "output" in name}
    parts = ("weight", "bias")
    names = {f"output_linear.{part}": f"out_proj.{part}" for part in parts}
    ssm = {f"ssm.{name}": tensor for name, tensor in diagonal_ssm_weights(inner).items()}
    return {**ssm, **rename(outer, names)}


def s4_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    r"""For :class:`~stateline.layers.S4SSM`: the kernel of state-spaces/s4 for ``legs``.

    After its first use, that kernel stores :math:`C (I - \bar A^L)` instead of C, for the length L
    in ``l_kernel``. This function recovers C.

    Args:
        tensors: ``A_real``, ``A_imag``, ``P`` (of rank one), ``B``, ``C``, ``inv_dt``,
            ``l_kernel``, and ``D``.

    Returns:
        By our names.

    Raises:
        InputError: If tensors are missing or left over, or the rank is not one.
    """
    ours = rename(tensors, _S4 | _READOUT | {"P": "p", "l_kernel": "l_kernel"})
    length = int(ours.pop("l_kernel"))
    ours = _upper_half(ours)
    return {**ours, "c": _plain_readout(ours, length)} if length else ours


def dss_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For the state space model inside :class:`~stateline.layers.DSS`: the kernel of ag1988/dss.

    Args:
        tensors: ``W``, ``log_dt``, and ``Lambda``, or ``Lambda_log_neg_re`` with ``Lambda_im`` or
            ``Lambda_log_im``; and ``D``.

    Returns:
        By our names.

    Raises:
        InputError: If tensors are missing or left over.
    """
    names = {"W": "c", "log_dt": "log_dt", "D": "skip"}
    if "Lambda" in tensors:
        ours = rename(tensors, names | {"Lambda": "real"})
        real, frequency = ours["real"].unbind(dim=-1)
        ours = {**ours, "real": real, "frequency": frequency}
    else:
        imag = "Lambda_log_im" if "Lambda_log_im" in tensors else "Lambda_im"
        ours = rename(tensors, names | {"Lambda_log_neg_re": "real", imag: "frequency"})
    steps = ours["log_dt"]
    return _per_output({**ours, "log_dt": steps if steps.ndim == 2 else steps[:, None]})


def s5_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For :class:`~stateline.layers.S5SSM`, or a :class:`~stateline.layers.Bidirectional` of one.

    Args:
        tensors: ``Lambda_re``, ``Lambda_im``, ``B``, ``C``, ``D``, ``log_step`` of
            lindermanlab/S5; a bidirectional one has ``C1`` and ``C2`` in place of ``C``.

    Returns:
        By our names; names of a bidirectional layer start with ``core.``. Its two readouts are one
        ``c``, and the input skips the first only.

    Raises:
        InputError: If tensors are missing or left over.
    """
    names = {
        "log_step": "log_dt",
        "Lambda_re": "real",
        "Lambda_im": "frequency",
        "B": "b",
        "C1" if "C1" in tensors else "C": "c",
        "D": "skip",
    }
    if "C1" not in tensors:
        found = rename(tensors, names)
        return {**found, "log_dt": found["log_dt"].flatten()}
    found = rename(tensors, names | {"C2": "c_backward"})
    both = {
        "log_dt": found["log_dt"].flatten(),
        "c": torch.cat([found["c"], found.pop("c_backward")]),
        "skip": torch.cat([found["skip"], torch.zeros_like(found["skip"])]),
    }
    return {f"core.{name}": tensor for name, tensor in {**found, **both}.items()}


def _upper_half(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Negate frequencies: the official S4 code stores modes of negative frequency, unsigned."""
    vectors = {name: _only(ours[name], name) for name in ("b", "p") if name in ours}
    steps = ours["log_dt"].flatten()
    return _per_output({**ours, **vectors, "frequency": -ours["frequency"], "log_dt": steps})


def _per_output(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the axes of channels and outputs."""
    return {**ours, "c": ours["c"].flatten(0, 1), "skip": ours["skip"].flatten()}


def _only(vectors: Tensor, name: str) -> Tensor:
    """Remove the axis of the rank, which official tensors have first."""
    if len(vectors) != 1:
        raise InputError(
            f"{name.upper()} must have rank one, got {len(vectors)}: only kernels of the measure "
            "legs can be converted"
        )
    return vectors[0]


def _plain_readout(ours: Mapping[str, Tensor], length: int) -> Tensor:
    """C from C (I - A^L), by solving a linear system per channel."""
    channels, dt = len(ours["log_dt"]), ours["log_dt"].double().exp()
    a = torch.stack([-ours["log_decay"].exp(), ours["frequency"]], dim=-1)
    copies = channels // len(a)
    step = transition(dt, *(t.double().repeat(copies, 1, 1) for t in (a, ours["p"])))
    one = torch.eye(step.shape[-1], dtype=step.dtype)
    mirror = torch.tensor([1.0, -1.0], dtype=step.dtype)
    stored = (ours["c"].double() * mirror).flatten(1).unflatten(0, (-1, channels))
    decayed = torch.linalg.matrix_power(step, length)
    plain = torch.linalg.solve(one - decayed, stored[..., None])[..., 0]
    return (plain.unflatten(-1, (-1, 2)) * mirror).flatten(0, 1).to(ours["c"].dtype)
