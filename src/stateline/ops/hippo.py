"""HiPPO matrices: transitions that make a state remember its input's history."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import unknown_name

Init = Literal["lin", "inv", "legs"]


def diagonal_frequencies(init: Init, modes: int) -> Float[Tensor, " mode"]:
    r"""Initial frequencies Im A of a diagonal state space model, with N = 2 ``modes``.

    - ``lin``: :math:`\pi n`
    - ``inv``: :math:`\frac{N}{\pi} \left(\frac{N}{1 + 2n} - 1\right)`
    - ``legs``: the lower half of the spectrum of the normal part of HiPPO-LegS, ascending.

    Raises:
        InputError: If ``init`` is none of these.

    Example:
        >>> diagonal_frequencies("lin", 3)
        tensor([0.0000, 3.1416, 6.2832])

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022, equations 8 and 9; HiPPO-LegS: Gu et al., NeurIPS 2020, theorem 2.
    """
    if init not in get_args(Init):
        raise unknown_name("init", init, get_args(Init))
    with torch.device("cpu"):  # a spectrum cannot be computed on the meta device
        n, size = torch.arange(modes, dtype=torch.float64), 2 * modes
        if init == "lin":
            frequencies = math.pi * n
        elif init == "inv":
            frequencies = size / math.pi * (size / (1 + 2 * n) - 1)
        else:
            frequencies = -torch.linalg.svdvals(_legs_skew(size))[::2]
    return frequencies.float()


def _legs_skew(size: int) -> Tensor:
    r"""The skew-symmetric part S of HiPPO-LegS.

    A_LegS + P P^T with :math:`P_n = \sqrt{n + 1/2}` is S - I/2, so that its eigenvalues are -1/2
    plus or minus i times the singular values of S, each of which comes twice.
    """
    n = torch.arange(size, dtype=torch.float64)
    root = torch.sqrt(torch.outer(2 * n + 1, 2 * n + 1)) / 2
    return root.triu(1) - root.tril(-1)
