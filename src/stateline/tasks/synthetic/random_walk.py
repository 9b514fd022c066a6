"""Random walk: predict the cell that each action leads to."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import numpy as np
from jaxtyping import Int

from stateline.settings import Count, within
from stateline.tasks.synthetic.stream import Episode, StreamTask

FORWARD, LEFT, RIGHT, RESET = range(4)
_HEADINGS = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])  # east, south, west, north


@dataclass(eq=False, kw_only=True)
class RandomWalk(StreamTask):
    """Follow an agent that turns and walks in a square grid, and give its cell at every token.

    .. code-block:: text

        walk   := reset action{reset_every}
        action := forward | left | right          drawn uniformly
        label  := cell after the token            row * grid + column
        row    := walk walk ... , cut after length tokens

    A walk begins in the upper left cell, heading right. A step that would leave the grid has no
    effect. The heading is not in the input, and in a label only with ``heading``: the label is then
    cell * 4 + heading, where the headings are right, down, left and up. Such a label gives the
    whole state, as in a word problem; learning it takes far fewer updates.

    Actions have the ids 0 to 2 in the order above, reset has 3, and cells have 4 and more.

    The paper says that an agent turns or moves forward in a small grid, that its location is to be
    predicted after each action, and that the length is 400. The rest is our definition: the size of
    the grid, the start, the walls, and the token that begins a new walk.

    Args:
        grid: Cells along a side.
        reset_every: Actions in a walk.
        heading: Ask for the heading, too.
        **options: See :class:`~stateline.tasks.StreamTask`; a walk is an episode.

    Example:
        >>> tokens, targets = RandomWalk(grid=3, length=8).train_batch(0)
        >>> tokens[2], targets[2] - 4
        (tensor([3, 0, 0, 2, 0, 1, 2, 0]), tensor([0, 1, 2, 2, 5, 5, 5, 8]))

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021.
    """

    title = "Random walk"
    about = (
        "Shows whether a model can update a state with every token, here a place and a hidden "
        "heading. Walls reveal the place, so in a small grid a short memory may suffice."
    )

    grid: Annotated[int, within(2)] = 8
    reset_every: Count = 400
    heading: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocab_size = 4 + self.grid**2 * (len(_HEADINGS) if self.heading else 1)
        self.least_row = self.reset_every
        if self.reset:  # an evaluation row holds one walk; the last length scores it whole
            whole = max(self.length, self.reset_every + 1)
            self.eval_lengths = (*(n for n in self.eval_lengths if n < whole), whole)

    def episode(self, rng: np.random.Generator) -> Episode:
        """Draw a walk."""
        actions = rng.integers(RESET, size=self.reset_every)
        turns = np.select([actions == LEFT, actions == RIGHT], [-1, 1])
        headings = np.concatenate([[0], np.cumsum(turns) % 4])
        row, column = map(self._walk, np.where(actions == FORWARD, _HEADINGS[headings[1:]].T, 0))
        labels = np.array([row, column]).T @ [self.grid, 1]
        if self.heading:
            labels = labels * len(_HEADINGS) + headings
        return Episode(np.concatenate([[RESET], actions]), 4 + labels)

    def _walk(self, moves: Int[np.ndarray, " n"]) -> list[int]:
        """Coordinates along one axis of the grid, beginning with 0."""
        last = self.grid - 1
        return list(accumulate(moves.tolist(), lambda at, m: min(max(at + m, 0), last), initial=0))
