from collections.abc import Callable
from typing import Any

import pytest
import torch

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel


@pytest.fixture(scope="session")
def build() -> Callable[..., LanguageModel]:
    """A model with strong opinions, in double precision, so that the likeliest token is clear."""

    def made(pattern: str, vocab_size: int = 11, **settings: Any) -> LanguageModel:
        torch.manual_seed(0)
        config = ModelConfig(pattern, vocab_size, 8, tie_embeddings=False, **settings)
        model = LanguageModel(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        return model

    return made
