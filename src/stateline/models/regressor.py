"""A regressor of sequences: continuous outputs."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.models.config import MAX_SIZE
from stateline.models.sequence_head import HeadConfig, SequenceHead


@dataclass(frozen=True)
class RegressorConfig(HeadConfig):
    """Configuration of a regressor: a :class:`~stateline.ModelConfig` with numbers as output.

    The settings of :class:`~stateline.models.sequence_head.HeadConfig` hold for it, too.

    Attributes:
        n_values: Numbers to predict at each position.
    """

    kind: ClassVar[str] = "regressor"

    n_values: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n_values <= MAX_SIZE:
            raise InputError(f"n_values must be from 1 to {MAX_SIZE:,}, got {self.n_values}")

    @property
    def n_outputs(self) -> int:
        """Predicted numbers per position."""
        return self.n_values


class SequenceRegressor(SequenceHead):
    """A sequence model whose outputs are continuous values.

    The outputs are used as they are: scale the targets to about unit variance for training.

    Args:
        config: What the model is made of.

    Raises:
        InputError: If the configuration cannot be built.

    Example:
        >>> import torch
        >>> config = RegressorConfig("s4d", d_model=16, n_channels=3, n_values=2, pooling="last")
        >>> model = SequenceRegressor(config)
        >>> signal = torch.zeros(2, 30, 3)
        >>> model(signal).shape, model.predict(signal, lengths=torch.tensor([30, 7])).shape
        (torch.Size([2, 30, 2]), torch.Size([2, 2]))
    """

    def __init__(self, config: RegressorConfig) -> None:
        super().__init__(config)
        self.config: RegressorConfig = config

    def predict(
        self, x: Tensor, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch values"]:
        """Values for whole rows; arguments and errors as for ``outputs``."""
        return self.outputs(x, lengths)
