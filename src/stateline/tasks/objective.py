"""Objectives: what a model predicts for a data set, the training loss, and the scores.

A tally is what the scores need from a batch, mostly sums over its targets. ``total`` joins tallies,
and ``score`` computes the scores.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.presets import configure
from stateline.models.sequence_head import ClassifierConfig, RegressorConfig
from stateline.tasks.base import IGNORE, Targets, cross_entropy

Loss = Literal["cross_entropy", "l1", "l2"]

ClassMetric = Literal["accuracy", "auroc"]


class Classes:
    """One of several classes, trained by cross entropy and scored by accuracy."""

    metric: str = "accuracy"
    scores: ClassVar[tuple[str, ...]] = ("accuracy",)
    higher_is_better = scores_share = True

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def model_config(self, pattern: str, settings: Mapping[str, Any]) -> ModelConfig:
        """Configuration of a classifier."""
        return configure(pattern, ClassifierConfig, n_classes=len(self.names), **settings)

    def no_targets(self, rows: int, length: int) -> np.ndarray:
        """``IGNORE`` everywhere."""
        return np.full((rows, length), IGNORE)

    def asked(self, targets: Targets) -> Tensor:
        """Targets other than ``IGNORE``."""
        return targets != IGNORE

    def loss(self, outputs: Float[Tensor, "batch length outputs"], targets: Targets) -> Tensor:
        """Cross entropy in nats."""
        return cross_entropy(outputs, targets)

    def tally(
        self, outputs: Float[Tensor, "batch length outputs"], targets: Targets
    ) -> Float[Tensor, "..."]:
        """Numbers of correct answers and of targets."""
        right, asked = outputs.argmax(dim=2) == targets, self.asked(targets)
        return torch.stack([right[asked].sum(), asked.sum()]).double()

    def total(self, tallies: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
        """The sums over all batches."""
        return torch.stack([*tallies]).sum(dim=0)

    def score(self, totals: Float[Tensor, "..."]) -> dict[str, float]:
        """Share of targets whose most likely class is correct."""
        right, count = totals.tolist()
        return {"accuracy": right / count}

    def describe(self) -> Mapping[str, object]:
        """The classes."""
        return {"classes": self.names}


class Ranked(Classes):
    r"""One of two classes, trained by cross entropy and scored by the area under the ROC curve.

    The area is the probability that a row of the second class has a higher score than a row of the
    first; equal scores count half. ``accuracy`` is also given.
    """

    metric = "auroc"
    scores = ("auroc", "accuracy")
    scores_share = False

    def __init__(self, names: Sequence[str]) -> None:
        if len(names) != 2:
            raise InputError(f"auroc needs two classes, got {len(names)}: score the accuracy")
        super().__init__(names)

    def tally(
        self, outputs: Float[Tensor, "batch length outputs"], targets: Targets
    ) -> Float[Tensor, "target 2"]:
        """Score and class of every target."""
        asked = self.asked(targets)
        scores = (outputs[..., 1] - outputs[..., 0])[asked]
        return torch.stack([scores.double(), targets[asked].double()], dim=1)

    def total(self, tallies: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
        """All scores and classes."""
        return torch.cat([*tallies])

    def score(self, totals: Float[Tensor, "..."]) -> dict[str, float]:
        """Area under the ROC curve by ranks; NaN if there is only one class."""
        scores, second = totals[:, 0], totals[:, 1] > 0
        _, place, count = scores.unique(return_inverse=True, return_counts=True)
        ranks = (count.cumsum(0) - (count - 1) / 2)[place]
        n, rest = int(second.sum()), int((~second).sum())
        area = (ranks[second].sum().item() - n * (n + 1) / 2) / (n * rest) if n * rest else math.nan
        accuracy = ((scores > 0) == second).double().mean().item()
        return {"auroc": area, "accuracy": accuracy}


class Values:
    r"""Continuous values, trained by L1 or L2 loss on normalised targets.

    Scores are in the original unit, averaged over all values: ``l1``, the mean absolute error;
    ``l2``, the mean squared error; and ``r2``, the mean over values of
    :math:`1 - \sum (y - \hat y)^2 / \sum (y - \bar y)^2`, without values that are constant.

    Args:
        loss: ``"l1"`` or ``"l2"``; also the metric.
        mean: Mean of each value in the training rows.
        deviation: Standard deviation of each value in the training rows.
        each: Whether every position has a target. Then the output at a position is by default
            computed from that position alone, without pooling.
    """

    scores = ("l1", "l2", "r2")
    higher_is_better = scores_share = False

    def __init__(
        self, loss: Literal["l1", "l2"], mean: np.ndarray, deviation: np.ndarray, *, each: bool
    ) -> None:
        self.metric = self.loss_name = loss
        self.mean, self.deviation = torch.from_numpy(mean), torch.from_numpy(deviation)
        self.each = each

    def model_config(self, pattern: str, settings: Mapping[str, Any]) -> ModelConfig:
        """Configuration of a regressor."""
        given = {"pooling": "last", **settings} if self.each else dict(settings)
        return configure(pattern, RegressorConfig, n_values=len(self.mean), **given)

    def no_targets(self, rows: int, length: int) -> np.ndarray:
        """NaN everywhere."""
        return np.full((rows, length, len(self.mean)), np.nan, np.float32)

    def asked(self, targets: Targets) -> Tensor:
        """Targets other than NaN."""
        return ~targets.isnan()

    def loss(self, outputs: Float[Tensor, "batch length outputs"], targets: Targets) -> Tensor:
        """Sum of absolute or squared differences of normalised values."""
        asked = self.asked(targets)
        difference = outputs[asked] - targets[asked]
        return difference.abs().sum() if self.loss_name == "l1" else difference.square().sum()

    def tally(
        self, outputs: Float[Tensor, "batch length outputs"], targets: Targets
    ) -> Float[Tensor, "..."]:
        """By value: count, absolute and squared errors, targets and their squares (normalised)."""
        asked = self.asked(targets)
        wanted = targets.double().nan_to_num()
        difference = (outputs.double() - wanted) * asked
        parts = (asked.double(), difference.abs(), difference**2, wanted, wanted**2)
        return torch.stack([part.sum(dim=(0, 1)) for part in parts])

    def total(self, tallies: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
        """The sums over all batches."""
        return torch.stack([*tallies]).sum(dim=0)

    def score(self, totals: Float[Tensor, "..."]) -> dict[str, float]:
        """Errors in the original unit, and R2."""
        count, absolute, squared, total, total_squares = totals
        spread = total_squares - total**2 / count
        moving = spread > 1e-12 * total_squares
        scores = {
            "l1": (absolute / count * self.deviation).mean().item(),
            "l2": (squared / count * self.deviation**2).mean().item(),
        }
        if moving.any():
            scores["r2"] = (1 - squared / spread)[moving].mean().item()
        return scores

    def describe(self) -> Mapping[str, object]:
        """The number of values."""
        return {"values": len(self.mean)}


Objective = Classes | Values
