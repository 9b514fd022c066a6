"""State passing: a long sequence is computed chunk by chunk."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from stateline.layers.base import AnyLayer, require_causal, require_same_width
from stateline.layers.compose import ActivationCheckpointing, Around
from stateline.settings import Count


class StatePassing(ActivationCheckpointing, Around):
    r"""Cut every input into chunks, and pass the core's state from chunk to chunk.

    .. math::
        y^{(c)}, s^{(c)} = \mathrm{core}\!\left(x^{(c)}, s^{(c-1)}\right)

    Outputs and gradients equal the core's on the whole sequence, since the state is all that
    later positions need. What the core computes in between, such as the padded transforms of a long
    convolution, exists for one chunk at a time: this memory does not grow with the length. With
    activation checkpointing (``train.checkpoint_activations``) that also holds in training, which
    then keeps the input and the state of every chunk.

    The layer has the state of the core. Chunks are counted from the beginning of each call.

    Args:
        core: Any sequence layer, usually with a state of constant size.
        chunk_len: Number of positions in a chunk.

    Raises:
        InputError: If ``chunk_len`` is not positive.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 4.2 and algorithm 2, for a diagonal
        state space model. Differs from the algorithm as printed, whose exponents begin at 0: in the
        state's contribution they begin at 1.
    """

    def __init__(self, core: AnyLayer, *, chunk_len: Count = 8192) -> None:
        super().__init__(core.d_model)
        require_same_width(core)
        require_causal(core, "state_passing")
        self.core, self.chunk_len = core, chunk_len

    @property
    def inner(self) -> AnyLayer:
        """The core."""
        return self.core

    @override
    def forward(self, x: Tensor, lengths: Tensor | None = None, **packed: Any) -> Tensor:
        if x.shape[1] <= self.chunk_len:
            return self.run(self.core, x, **packed)
        return self.forward_chunk(x, self.init_state(len(x)), **packed)[0]

    @override
    def forward_chunk(self, x: Tensor, state: Any, **packed: Any) -> tuple[Tensor, Any]:
        outputs, place = [], 0
        for chunk in x.split(self.chunk_len, dim=1):
            own = {name: starts.cut(place, chunk.shape[1]) for name, starts in packed.items()}
            y, state = self.run(self.core.forward_chunk, chunk, state, **own)
            outputs.append(y)
            place += chunk.shape[1]
        return torch.cat(outputs, dim=1), state

    def flops_per_token(self, length: int) -> float:
        """Operations of the core on a chunk."""
        return self.core.flops_per_token(min(length, self.chunk_len))
