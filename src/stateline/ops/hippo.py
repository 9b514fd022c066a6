"""HiPPO matrices: transitions whose state is a compressed history of the input."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import check_choice
from stateline.ops.planes import conjugate, multiply

Init = Literal["lin", "inv", "legs"]
Measure = Literal["legs", "legt", "lagt"]


class Hippo(NamedTuple):
    r"""A HiPPO system :math:`\dot x = A x + B u` in float64, and the low-rank part P.

    :math:`A + \sum_r P_r P_r^T` is normal: a multiple of the identity plus a skew-symmetric matrix.
    """

    a: Float[Tensor, "size size"]
    b: Float[Tensor, " size"]
    p: Float[Tensor, "rank size"]


class NormalForm(NamedTuple):
    r"""Eigenvalues and eigenvectors of a HiPPO matrix's normal part, as float64 planes.

    Only the eigenvalues with negative imaginary part, ascending; the others are their conjugates.
    The phase of each eigenvector is fixed by :math:`v^* P_0 \ge 0`.
    """

    values: Float[Tensor, "mode 2"]
    vectors: Float[Tensor, "size mode 2"]


def hippo(measure: Measure, size: int) -> Hippo:
    r"""The HiPPO system of a measure, normalised as in S4.

    - ``legs`` (scaled Legendre): :math:`A_{nk} = -\sqrt{(2n+1)(2k+1)}` for :math:`n > k`,
      :math:`-(n+1)` for :math:`n = k`; :math:`B_n = \sqrt{2n+1}`; rank one,
      :math:`P_n = \sqrt{n + 1/2}`.
    - ``legt`` (window of length one): :math:`A_{nk} = -\sqrt{(2n+1)(2k+1)}`, times
      :math:`(-1)^{n-k}` for :math:`n < k`; the same B; rank two,
      :math:`\sqrt{2n+1}` at the even entries and at the odd entries.
    - ``lagt`` (exponential decay): :math:`A_{nk} = -1` for :math:`n > k`, :math:`-1/2` for
      :math:`n = k`; :math:`B_n = 1`; rank one, :math:`P_n = \sqrt{1/2}`.

    Raises:
        InputError: If ``measure`` is none of these.

    Example:
        >>> hippo("lagt", 2).a
        tensor([[-0.5000,  0.0000],
                [-1.0000, -0.5000]], dtype=torch.float64)

    References:
        Gu et al., "HiPPO", NeurIPS 2020, theorems 1 and 2; Gu et al., "Efficiently Modeling Long
        Sequences with Structured State Spaces", ICLR 2022, appendix C.1.
    """
    check_choice("measure", measure, get_args(Measure))
    with torch.device("cpu"):  # a spectrum cannot be computed on the meta device
        n = torch.arange(size, dtype=torch.float64)
        root = torch.sqrt(2 * n + 1)
        if measure == "lagt":
            a = (
                torch.eye(size, dtype=torch.float64) / 2
                - torch.ones_like(n).expand(size, -1).tril()
            )
            return Hippo(a, torch.ones_like(n), torch.full_like(n, 0.5**0.5)[None])
        full = torch.outer(root, root)
        if measure == "legs":
            return Hippo(-full.tril(-1) - torch.diag(n + 1), root, (n + 0.5).sqrt()[None])
        even = 1 - n % 2
        signs = torch.outer(2 * even - 1, 2 * even - 1)
        return Hippo(
            -full.tril() - (full * signs).triu(1),
            root,
            torch.stack([root * even, root * (1 - even)]),
        )


def normal_form(measure: Measure, size: int) -> NormalForm:
    r"""Eigenvalues and eigenvectors of the normal part of a HiPPO matrix.

    The normal part is :math:`\sigma I + K` with a skew-symmetric K, whose singular values come in
    pairs. For a singular vector u of the pair w, and :math:`v = K u / w`, the vector
    :math:`(u + iv)/\sqrt 2` is an eigenvector of :math:`\sigma - iw`. So no complex eigensolver is
    needed.

    Args:
        measure: See :func:`hippo`.
        size: Number of rows, even.

    Returns:
        Half of the spectrum; the other half is its conjugate.

    Example:
        >>> normal_form("legs", 2).values
        tensor([[-0.5000, -0.8660]], dtype=torch.float64)
    """
    a, _, p = hippo(measure, size)
    with torch.device("cpu"):
        normal = a + p.mT @ p
        skew = (normal - normal.mT) / 2
        u, w, _ = torch.linalg.svd(skew)
        u, w = u[:, ::2], w[::2]
        vectors = torch.stack([u, skew @ u / w], dim=-1) * 0.5**0.5
        shift = normal.diagonal().mean().expand_as(w)
        return NormalForm(torch.stack([shift, -w], dim=-1), _fix_phase(vectors, p[0]))


def diagonal_plus_low_rank(
    measure: Measure, size: int
) -> tuple[Float[Tensor, "mode 2"], Float[Tensor, "rank mode 2"], Float[Tensor, "mode 2"]]:
    r"""A HiPPO system in the eigenbasis of its normal part: Lambda, P and B.

    :math:`A = V (\Lambda - \sum_r P_r P_r^*) V^*`, in float64. One mode of each conjugate pair is
    returned. For ``legs``, B is :math:`\sqrt 2 P`, and both are real.
    """
    # Differs from the official S4 code, which clips the imaginary part of B to [-2, 2]. The clipped
    # value depends on the arbitrary phases of the eigenvectors, so nothing is clipped here.
    _, b, p = hippo(measure, size)
    values, vectors = normal_form(measure, size)
    return (
        values,
        torch.einsum("rn,nmz->rmz", p, conjugate(vectors)),
        torch.einsum("n,nmz->mz", b, conjugate(vectors)),
    )


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
    check_choice("init", init, get_args(Init))
    with torch.device("cpu"):
        n, size = torch.arange(modes, dtype=torch.float64), 2 * modes
        if init == "lin":
            frequencies = math.pi * n
        elif init == "inv":
            frequencies = size / math.pi * (size / (1 + 2 * n) - 1)
        else:
            frequencies = normal_form("legs", size).values[:, 1]
    return frequencies.float()


def _fix_phase(
    vectors: Float[Tensor, "size mode 2"], p: Float[Tensor, " size"]
) -> Float[Tensor, "size mode 2"]:
    r"""Multiply each vector by a phase such that :math:`v^* p \ge 0`."""
    inner = torch.einsum("n,nmz->mz", p, vectors)  # conjugate of v* p
    phase = inner / inner.norm(dim=-1, keepdim=True)
    return multiply(vectors, conjugate(phase))
