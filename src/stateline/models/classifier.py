"""A classifier of sequences."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.models.config import MAX_SIZE
from stateline.models.sequence_head import HeadConfig, SequenceHead


@dataclass(frozen=True)
class ClassifierConfig(HeadConfig):
    """Configuration of a classifier: a :class:`~stateline.ModelConfig` with classes as output.

    The settings of :class:`~stateline.models.sequence_head.HeadConfig` hold for it, too.

    Attributes:
        n_classes: Number of classes.
    """

    kind: ClassVar[str] = "classifier"

    n_classes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.n_classes <= MAX_SIZE:
            raise InputError(f"n_classes must be from 2 to {MAX_SIZE:,}, got {self.n_classes}")

    @property
    def n_outputs(self) -> int:
        """Logits per position."""
        return self.n_classes


class SequenceClassifier(SequenceHead):
    """A sequence model whose outputs are the logits of classes.

    Args:
        config: What the model is made of.

    Raises:
        InputError: If the configuration cannot be built.

    Example:
        >>> import torch
        >>> config = ClassifierConfig("s4d", d_model=16, n_channels=1, n_classes=10)
        >>> model = SequenceClassifier(config)
        >>> audio = torch.zeros(2, 30, 1)
        >>> model.classify(audio, lengths=torch.tensor([30, 7])).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        self.config: ClassifierConfig = config

    def classify(
        self, x: Tensor, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """Logits for whole rows; arguments and errors as for ``outputs``."""
        return self.outputs(x, lengths)
