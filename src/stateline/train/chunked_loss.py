"""A loss that never has the logits of all positions in memory."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stateline.models.language_model import Reduce, chunks
from stateline.tasks.base import Targets


def chunked(loss: Callable[[Tensor, Tensor], Tensor], positions: int, targets: Targets) -> Reduce:
    """Sum a loss over chunks of positions; each computes its logits again in the backward pass.

    Args:
        loss: The loss of logits and targets, summed over the targets.
        positions: Positions in a chunk, over all rows.
        targets: The targets of a batch.
    """

    def of_chunk(logits: Callable[[Tensor], Tensor], h: Tensor, wanted: Tensor) -> Tensor:
        outputs = logits(h).float()
        with torch.autocast(h.device.type, enabled=False):
            return loss(outputs, wanted)

    def reduce(logits: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        losses = [
            checkpoint(of_chunk, logits, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks(h, targets, positions)
        ]
        return torch.stack(losses).sum()

    return reduce
