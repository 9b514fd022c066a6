"""The forward pass of training, as one module."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stateline.layers.base import row_inputs
from stateline.layers.state import replace_rows
from stateline.models.factory import AnyModel
from stateline.models.language_model import Reduce
from stateline.tasks.base import Inputs, Targets


class Segment(nn.Module):
    """A model applied to one segment of its rows.

    All forward passes of training are calls of this module, with or without a state, since DDP,
    FSDP and ``torch.compile`` act on calls of modules.

    Args:
        model: The model.
        dtype: Precision of matrix products, by autocast; weights and states keep their own.
        loss: Gives the loss in place of the logits, for the targets of a call.
        distillation: Gives the loss in place of the logits, from the model, the inputs, the targets
            and the beginnings of documents.
    """

    def __init__(
        self,
        model: AnyModel,
        dtype: torch.dtype = torch.float32,
        loss: Callable[[Targets], Reduce] | None = None,
        distillation: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.loss = model, dtype, loss
        self.distillation = distillation

    def forward(
        self,
        tokens: Inputs,
        state: Any = None,
        fresh: Bool[Tensor, " batch"] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        starts: Bool[Tensor, "batch length"] | None = None,
        targets: Targets | None = None,
    ) -> tuple[Float[Tensor, "batch length classes"] | Float[Tensor, ""], Any]:
        """Logits or the loss, and the state after the segment.

        Args:
            tokens: Inputs.
            state: State before them; ``None`` if all rows begin with an empty state.
            fresh: Rows that begin with an empty state; ``None`` if no state is needed, which is
                faster.
            lengths: Number of positions of each row, for models that are not causal.
            starts: True where a document of packed rows begins.
            targets: For the loss, if the segment gives it.
        """
        options: dict[str, Any] = {} if starts is None else {"starts": starts}
        if self.loss is not None and targets is not None:
            options["reduce"] = self.loss(targets)
        lower = self.dtype != torch.float32
        if fresh is not None:
            # Called every time: learned initial states must take part in every forward pass
            # under DDP and FSDP.
            begun = self.model.init_state(len(fresh))
            state = begun if state is None or fresh.all() else replace_rows(state, fresh, begun)
        with torch.autocast(tokens.device.type, self.dtype, enabled=lower):
            if self.distillation is not None and targets is not None:
                return self.distillation(self.model, tokens, targets, starts), None
            if fresh is None:
                return self.model(*row_inputs(self.model, tokens, lengths), **options).float(), None
            outputs, state = self.model.forward_chunk(tokens, state, **options)
            return outputs.float(), state
