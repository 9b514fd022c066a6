"""Bidirectional layers: each row is read from both ends."""

from typing import Any, ClassVar, Literal, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer, require_causal
from stateline.layers.linear import Linear

Combine = Literal["project", "sum"]


class Bidirectional(SequenceLayer[Any]):
    r"""One core that reads each row from both ends, for models of whole rows.

    With :math:`R` the reversal of a row within its own length,

    .. math::
        y = W \begin{bmatrix} \mathrm{core}(x) \\ R\,\mathrm{core}(R\,x) \end{bmatrix} + b
        \quad (\text{project}), \qquad
        y = \mathrm{core}_1(x) + R\,\mathrm{core}_2(R\,x) \quad (\text{sum}).

    Both directions share the core's weights, as the official S4 and S5 share the transition and the
    input matrix; the projection reads each direction by weights of its own. In the sum,
    :math:`\mathrm{core}_1` and :math:`\mathrm{core}_2` are the core itself or, if it has two
    signals per channel (``n_outputs=2``), its first and its second signal: a readout for each
    direction.

    It is not causal: every output depends on the whole row, so there is no state and no step. In a
    pattern, the core is built without residual branches, and the layer stands in a block of its
    own.

    Args:
        core: Any causal layer.
        combine: ``project`` or ``sum``.

    Raises:
        InputError: If the core is not causal, ``combine`` is unknown, or the sum would have another
            width than the input.

    References:
        Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022,
        whose official code sums both directions; Smith et al., "Simplified State Space Layers for
        Sequence Modeling", ICLR 2023, whose official code reads their concatenation.
    """

    is_mixer: ClassVar[bool] = True
    causal = False

    def __init__(self, core: AnyLayer, *, combine: Combine = "project") -> None:
        super().__init__(core.d_model)
        require_causal(core, "bidirectional")
        if combine == "sum" and core.d_output not in (core.d_model, 2 * core.d_model):
            raise InputError(
                "combine=sum needs a core of one or two signals per channel, got "
                f"{core.d_output} signals and d_model={core.d_model}: take combine=project"
            )
        self.core, self.combine = core, combine
        project = combine == "project"
        self.out_proj = Linear(2 * core.d_output, core.d_model) if project else None

    @override
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        # Rows are padded at the end; outputs beyond their lengths are arbitrary.
        forward, backward = self.core(x), reverse(self.core(reverse(x, lengths)), lengths)
        if self.out_proj is not None:
            return self.out_proj(torch.cat([forward, backward], dim=-1))
        return forward[..., : self.d_model] + backward[..., -self.d_model :]

    def init_state(self, batch_size: int, *, capacity: int = 0) -> NoReturn:  # noqa: ARG002
        """Refused: there is no state."""
        require_causal(self, "a state")
        raise AssertionError

    @override
    def forward_chunk(self, x: Tensor, state: Any) -> NoReturn:
        self.init_state(len(x))

    def state_bytes(self, length: int) -> int:  # noqa: ARG002
        """None."""
        return 0

    def flops_per_token(self, length: int) -> float:
        """Both directions, and the projection."""
        project = 0 if self.out_proj is None else self.out_proj.weight.numel()
        return 2 * self.core.flops_per_token(length) + 2.0 * project


def reverse(
    x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
) -> Float[Tensor, "batch length width"]:
    """Reverse each row within its own length; the padding stays in its place.

    Example:
        >>> x = torch.arange(4.0).expand(2, 4)[..., None]
        >>> reverse(x, torch.tensor([4, 2]))[..., 0].tolist()
        [[3.0, 2.0, 1.0, 0.0], [1.0, 0.0, 2.0, 3.0]]
    """
    if lengths is None:
        return x.flip(1)
    places, ends = torch.arange(x.shape[1], device=x.device), lengths.to(x.device)[:, None]
    mirrored = torch.where(places < ends, ends - 1 - places, places)
    return x.gather(1, mirrored[..., None].expand_as(x))
