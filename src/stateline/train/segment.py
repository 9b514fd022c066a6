"""The forward pass of training, as one module."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stateline.layers.state import replace_rows
from stateline.models.make import AnyModel
from stateline.tasks.base import Inputs


class Segment(nn.Module):
    """A model on one segment of its rows.

    All of training goes through its ``forward``, so that whatever hooks into forward passes (DDP,
    FSDP, ``torch.compile``) sees one, whether there is a state or not.

    Args:
        model: The model.
        dtype: Precision of matrix products, by autocast; weights and states keep their own.
    """

    def __init__(self, model: AnyModel, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(
        self, tokens: Inputs, state: Any = None, fresh: Bool[Tensor, " batch"] | None = None
    ) -> tuple[Float[Tensor, "batch length classes"], Any]:
        """Logits, and the state after the segment.

        Args:
            tokens: Inputs.
            state: State before them; ``None`` where all rows begin anew.
            fresh: Which rows begin anew; ``None`` where no state is wanted, which costs less.
        """
        lower = self.dtype != torch.float32
        if fresh is not None:
            # Here, and in every call: what is learned in it may be sharded, and has to take part.
            begun = self.model.init_state(len(fresh))
            state = begun if state is None or fresh.all() else replace_rows(state, fresh, begun)
        with torch.autocast(tokens.device.type, self.dtype, enabled=lower):
            if fresh is None:
                return self.model(tokens).float(), None
            logits, state = self.model.forward_chunk(tokens, state)
            return logits.float(), state
