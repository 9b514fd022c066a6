"""Object collision: find where particles of two colours met last."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.settings import Count, within
from stateline.tasks.base import IGNORE, Batch, LabelledTask

STEP = 8
"""Tokens in a step: row, column and colour of either particle, and the two colours asked about."""

_SPEED, _RECOLOUR, _LATEST = 0.5, 0.05, 0.4


@dataclass(eq=False, kw_only=True)
class ObjectCollision(LabelledTask):
    """Follow two particles that change colour, and give the place where two colours met last.

    .. code-block:: text

        row      := step step ...
        step     := particle particle colour colour     the last two are asked about
        particle := row column colour

    Particles meet when they are in the same cell. Only the last token of a step has a label: the
    quadrant of the last meeting at which the first particle had the first colour and the second
    particle had the second colour. There is no label if there was no such meeting.

    A particle starts at a uniform place, with a normal velocity of standard deviation 0.5 in each
    direction. In every step it moves by its velocity, which is drawn again if the particle would
    reach the border; its cell is the nearest one. With probability 1/20 per step its colour is
    drawn again. With probability 2/5 the two colours in question are the colours of the last
    meeting of all (if there was none, both tokens are the id before the colours in question);
    otherwise they are uniform.

    Rows have the first ids, followed by columns, colours, colours in question, and the quadrants:
    upper left, upper right, lower left, lower right.

    Args:
        grid: Cells along a side.
        n_colors: Number of colours.
        **options: See :class:`~stateline.tasks.LabelledTask`; lengths are multiples of 8.

    Example:
        >>> tokens, targets = ObjectCollision(grid=4, n_colors=2, length=64).train_batch(0)
        >>> tokens.shape, sorted(set(targets.flatten().tolist()))
        (torch.Size([32, 64]), [-100, 12, 13, 14, 15])

    References:
        Sukhbaatar et al., "Not All Memories are Created Equal: Learning to Forget by Expiring",
        ICML 2021; the semantics follow ``ParticleCollisionData`` in
        facebookresearch/transformer-sequential, where all rows are parts of one world. Differs from
        there: its colours of the last meeting are views of the particles' colours and change with
        them, so that it asks about the present colours. In 500 steps of the default grid, 3 % of
        its steps have a label; here 17 %.
    """

    title = "Object collision"
    about = (
        "Shows whether a model keeps rare important events for long among many irrelevant tokens. "
        "Particles meet about once in 300 steps of the default grid, so few tokens are scored; a "
        "smaller grid is learned faster. A guess is right once in four."
    )

    grid: Annotated[int, within(2)] = 16
    n_colors: Count = 5
    length: int = 512

    def __post_init__(self) -> None:
        _check_length(self.length)
        super().__post_init__()
        self._first_color, self._first_asked = 2 * self.grid, 2 * self.grid + self.n_colors
        self.n_inputs = 2 * (self.grid + self.n_colors)
        self.vocab_size = self.n_inputs + 4
        self.least_row = self.length // STEP * self.n_colors**2  # when each pair met last

    def targets(self, tokens: Int[Tensor, "rows length"]) -> Int[Tensor, "rows length"]:
        """Labels of rows of tokens."""
        steps = tokens.numpy().reshape(len(tokens), -1, STEP)
        asked = (steps[..., 6:] - self._first_asked) @ [self.n_colors, 1]
        last = self._last_met(steps)
        when = np.take_along_axis(last, np.maximum(asked, 0)[..., None], axis=2)[..., 0]
        # In an odd grid, the middle row and column belong to the upper and left halves.
        row, column = (2 * steps[..., :2] >= np.array([1, 3]) * self.grid).transpose(2, 0, 1)
        quadrant = np.take_along_axis(2 * row + column, np.maximum(when, 0), axis=1)
        targets = np.full_like(steps, IGNORE)
        targets[..., -1] = np.where((asked < 0) | (when < 0), IGNORE, self.n_inputs + quadrant)
        return torch.from_numpy(targets.reshape(tokens.shape))

    def _last_met(
        self, steps: Int[np.ndarray, "rows steps tokens"]
    ) -> Int[np.ndarray, "rows steps pairs"]:
        """Step at which each pair of colours met last, or -1."""
        met = (steps[..., :2] == steps[..., 3:5]).all(axis=2)
        pair = (steps[..., [2, 5]] - self._first_color) @ [self.n_colors, 1]
        pair_met = met[..., None] & (pair[..., None] == np.arange(self.n_colors**2))
        times = np.where(pair_met, np.arange(steps.shape[1])[:, None], -1)
        return np.maximum.accumulate(times, axis=1)

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:  # noqa: ARG002
        """Draw worlds of two particles."""
        _check_length(length)
        particles = self._particles(rng, count, length // STEP)
        last, n_pairs = self._last_met(particles), self.n_colors**2
        pair = rng.integers(n_pairs, size=last.shape[:2])
        latest = rng.random(pair.shape) < _LATEST
        pair = np.where(latest, last.argmax(axis=2), pair)
        asked = np.stack(np.divmod(pair, self.n_colors), axis=-1)
        asked[latest & (last.max(axis=2) < 0)] = -1
        steps = np.concatenate([particles, self._first_asked + asked], axis=2)
        tokens = torch.from_numpy(steps.reshape(count, length))
        return Batch(tokens, self.targets(tokens))

    def _particles(
        self, rng: np.random.Generator, count: int, steps: int
    ) -> Int[np.ndarray, "count steps 6"]:
        """Tokens of both particles at each step."""
        border, offsets = self.grid - 1, np.array([0, self.grid])
        place = rng.random((count, 2, 2)) * border
        velocity = rng.normal(scale=_SPEED, size=place.shape)
        color = rng.integers(self.n_colors, size=(count, 2))
        tokens = np.empty((count, steps, 2, 3), dtype=np.int64)
        for step in range(steps):
            while (out := ((to := place + velocity) <= 0).any(2) | (to >= border).any(2)).any():
                velocity[out] = rng.normal(scale=_SPEED, size=(out.sum(), 2))
            place += velocity
            drawn = rng.integers(self.n_colors, size=color.shape)
            color = np.where(rng.random(color.shape) < _RECOLOUR, drawn, color)
            tokens[:, step, :, :2] = np.rint(place) + offsets
            tokens[:, step, :, 2] = self._first_color + color
        return tokens.reshape(count, steps, 6)


def _check_length(length: int) -> None:
    if length < STEP or length % STEP:
        raise InputError(
            f"length must be a multiple of the {STEP} tokens of a step, got length={length}"
        )
