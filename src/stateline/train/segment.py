"""The forward pass of training, as one module."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
        self, tokens: Inputs, state: Any = None
    ) -> tuple[Float[Tensor, "batch length classes"], Any]:
        """Logits, and the state after the segment: none if none was given, which costs less."""
        lower = self.dtype != torch.float32
        with torch.autocast(tokens.device.type, self.dtype, enabled=lower):
            if state is None:
                return self.model(tokens).float(), None
            logits, state = self.model.forward_chunk(tokens, state)
            return logits.float(), state
