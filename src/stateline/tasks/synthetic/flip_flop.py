"""Flip-flop: give the bit that was written last."""

from dataclasses import dataclass

import numpy as np
import torch

from stateline.settings import Share, at_least
from stateline.tasks.base import IGNORE, Batch, LabelledTask, train_settings

WRITE, READ, PASS = 2, 3, 4


@dataclass(eq=False, kw_only=True)
class FlipFlop(LabelledTask):
    """Read and write a one-bit memory.

    .. code-block:: text

        row  := "write" bit (instruction bit)*      the last instruction is "read"
        instruction := "write" | "read" | "ignore"

    After "write" and "ignore" the bit is drawn uniformly. After "read" it is the bit that was
    written last, which is also the target at "read". An instruction is "ignore" with probability
    ``p_ignore``; otherwise it is "write" or "read" with equal probability.

    The bits have the ids 0 and 1, followed by "write", "read" and "ignore".

    Args:
        p_ignore: Probability of "ignore" in training.
        eval_p_ignore: Probability of "ignore" in evaluation; by default as in training. The higher
            it is, the further back the last "write" lies.
        **options: See :class:`~stateline.tasks.LabelledTask`.

    Example:
        >>> tokens, targets = FlipFlop(length=9, p_ignore=0.5).train_batch(0)
        >>> tokens[0]  # write 0, read 0, ignore 1, ignore 1, read
        tensor([2, 0, 3, 0, 4, 1, 4, 1, 3])
        >>> targets[0]
        tensor([-100, -100,    0, -100, -100, -100, -100, -100,    0])

    References:
        Liu et al., "Exposing Attention Glitches with Flip-Flop Language Modeling", NeurIPS 2023.
        Differs from there: only bits after "read" count in the loss, since all other tokens are
        random.
    """

    title = "Flip-flop"
    about = (
        "Shows whether a model can keep one bit exactly, over any distance. It does not test how "
        "much fits into a state. Attention can look the bit up, but errs at rare distances."
    )
    solved_at = 0.99
    training = train_settings(
        steps=2000, lr=2e-3, schedule="linear", eval_every=100, stop_at=0.9999
    )

    shortest = 3  # a write and a read
    times = (1, 2, 4, 8)
    vocab_size = 5
    length: int = 64
    p_ignore: Share = 0.8
    eval_p_ignore: Share | None = None

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:
        """Draw rows of ``length`` tokens."""
        at_least(self.shortest, length=length)
        p_ignore = self.p_ignore
        if not training and self.eval_p_ignore is not None:
            p_ignore = self.eval_p_ignore
        shape = (count, (length + 1) // 2)
        active = rng.choice([WRITE, READ], size=shape)
        instructions = np.where(rng.random(shape) < p_ignore, PASS, active)
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        drawn = rng.integers(2, size=shape)
        written = np.where(instructions == WRITE, np.arange(shape[1]), 0)
        memory = np.take_along_axis(drawn, np.maximum.accumulate(written, axis=1), axis=1)
        reads = instructions == READ
        bits = np.where(reads, memory, drawn)
        tokens = np.stack([instructions, bits], axis=2).reshape(count, -1)[:, :length]
        asked = np.where(reads, memory, IGNORE)
        silent = np.full_like(asked, IGNORE)
        targets = np.stack([asked, silent], axis=2).reshape(count, -1)[:, :length]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
