"""Functions of single positions: linear map, feed-forward with GELU, SwiGLU, norm, rotation."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound
from stateline.ops.declared import mixed, one_precision
from stateline.ops.op import Example, Op, Sizes


class FeedForwardWeights(NamedTuple):
    """Weights of a feed-forward.

    Attributes:
        w_in: First matrix.
        b_in: Its bias.
        w_out: Second matrix.
        b_out: Its bias.
    """

    w_in: Float[Tensor, "hidden d_in"]
    b_in: Float[Tensor, " hidden"]
    w_out: Float[Tensor, "d_out hidden"]
    b_out: Float[Tensor, " d_out"]


def example(sizes: Sizes) -> Example:
    """A feed-forward of four hidden units per channel, with inputs in the dtype of its weights."""
    width = sizes.d_model
    weights = FeedForwardWeights(
        sizes.weight(4 * width, width) / width**0.5,
        sizes.weight(4 * width),
        sizes.weight(width, 4 * width) / width**0.5,
        sizes.weight(width),
    )
    x = sizes.weight(sizes.batch, sizes.length, width)
    return Example((x, weights), 16.0 * sizes.positions * width, "feed_forward")


OP = Op(__name__, ["numba"], example)


def _one_dtype(x: Tensor, weights: tuple[Tensor, ...]) -> str:
    """Why the products are impossible, or an empty string; autocast chooses their precision."""
    if (kinds := mixed(x, weights)) and not torch.is_autocast_enabled(x.device.type):
        return f"x and the weights need one dtype, got {kinds}"
    return ""


@bound(OP, _one_dtype)
def feed_forward(
    x: Float[Tensor, "*batch d_in"], weights: FeedForwardWeights, *, backend: Backend = "auto"
) -> Float[Tensor, "*batch d_out"]:
    r"""Map each position by the same two-layer network.

    .. math:: y = W_2\, \mathrm{gelu}(W_1 x + b_1) + b_2, \qquad
        \mathrm{gelu}(z) = \tfrac12\, z \bigl(1 + \tanh(\sqrt{2/\pi}\, (z + 0.044715\, z^3))\bigr)

    Args:
        x: Inputs.
        weights: Matrices W and biases b.

    Returns:
        Outputs in the dtype of ``x``; under autocast, in the dtype of matrix products.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1)
        >>> feed_forward(one, FeedForwardWeights(one, torch.zeros(1), 2 * one, torch.ones(1)))
        tensor([[2.6824]])

    References:
        Vaswani et al., 2017, section 3.3; Hendrycks and Gimpel, "Gaussian Error Linear Units",
        2016, section 2.
    """
    return backend(x, weights)


READ = 1 << 16
"""Entries of a weight from which reading it is the time of a map of a few rows."""


def _one_dtype_of_map(weight: Tensor, bias: Tensor | None) -> str:
    """Why weight and bias do not fit each other, or an empty string."""
    return "" if bias is None else _one_dtype(weight, (bias,))


@bound(OP, _one_dtype_of_map)
def linear_stepper(
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
    *,
    backend: Backend = "auto",
) -> Callable[[Tensor], Tensor]:
    r"""Prepare the linear map of many single tokens without gradients.

    The time of such a map is that of reading the weight.

    Args:
        weight: The matrix W.
        bias: b; ``None`` means zero.

    Returns:
        ``step(x)`` returns :math:`y = W x + b` for inputs (\*batch, d_in). It reads the memory that
        the weights have now.

    Example:
        >>> import torch
        >>> linear_stepper(torch.tensor([[1.0, 2.0]]), torch.tensor([0.5]))(torch.ones(1, 2))
        tensor([[3.5000]])
    """
    step: Callable[[Tensor], Tensor] = backend(weight, bias)
    return step


def _halves(h: Tensor) -> str:
    """Why the entries are not two halves, or an empty string."""
    return f"the last axis needs two halves, got {h.shape[-1]} entries" if h.shape[-1] % 2 else ""


@bound(OP, _halves)
def swiglu(
    h: Float[Tensor, "*batch joint"], *, backend: Backend = "auto"
) -> Float[Tensor, "*batch hidden"]:
    r"""Gate one half of the entries by the other.

    .. math:: y_j = \mathrm{silu}(h_j)\, h_{j+n}, \qquad \mathrm{silu}(g) = g / (1 + e^{-g})
        \qquad (j < n)

    Args:
        h: 2n entries of each position: the gates, then what they multiply.

    Returns:
        n entries of each position.

    Example:
        >>> import torch
        >>> swiglu(torch.tensor([1.0, 2.0]))
        tensor([1.4621])

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return backend(h)


@bound(OP)
def rms_norm(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, " d_model"],
    eps: float,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "*batch d_model"]:
    r"""Normalise each position by its root mean square.

    .. math:: y = w \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    Args:
        x: Inputs.
        weight: w.
        eps: :math:`\epsilon`.

    Returns:
        As ``torch.nn.functional.rms_norm``.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([1.0, 7.0]), torch.ones(2), 0.0)
        tensor([0.2000, 1.4000])

    References:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return backend(x, weight, eps)


def _pairs_fit(x: Tensor, cos: Tensor, sin: Tensor) -> str:
    """Why the angles do not fit the heads, or an empty string."""
    pairs, entries = cos.shape[-1], x.shape[-1]
    if cos.shape != sin.shape:
        return f"cos and sin need one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}"
    if 2 * pairs > entries:
        return f"{pairs} pairs need more than {entries} entries"
    return one_precision("cos and sin need", cos, sin)


@bound(OP, _pairs_fit)
def rotary(
    x: Float[Tensor, "batch length head d_head"],
    cos: Float[Tensor, "#batch length pair"],
    sin: Float[Tensor, "#batch length pair"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    r"""Rotate pairs of entries of each head by angles; the core of rotary position embeddings.

    .. math:: y_j = x_j \cos \theta_j - x_{j+p} \sin \theta_j, \qquad
        y_{j+p} = x_{j+p} \cos \theta_j + x_j \sin \theta_j \qquad (j < p)

    Entries after the p pairs stay as they are.

    Args:
        x: Queries or keys.
        cos: Cosine of the angle of each pair, in float32 or better; one row serves all rows of
            ``x``. No gradient reaches it.
        sin: Sine of the angle.

    Returns:
        The rotated tensor, in the dtype of ``x``.

    Example:
        A quarter turn.

        >>> import torch
        >>> x, zero = torch.tensor([1.0, 2.0, 5.0]).reshape(1, 1, 1, 3), torch.zeros(1, 1, 1)
        >>> rotary(x, zero, zero + 1).flatten()
        tensor([-2.,  1.,  5.])

    References:
        Su et al., "RoFormer", 2021.
    """
    return backend(x, cos, sin)
