"""Models for the tests of the Hugging Face bridge; without a network."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

Make = Callable[..., LanguageModel]

MIXED = "attention(position=alibi) h3 mamba gated_delta_net attention(position=rope)"


class Bridge:
    """``stateline.hf``, imported when it is first used: tests that do not run must not wait."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks, while it looks for fixtures
            raise AttributeError(name)
        return getattr(importlib.import_module("stateline.hf"), name)


hf = Bridge()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Importing transformers takes seconds, so all tests of this folder are slow ones."""
    for item in items:
        if "tests/hf/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def make() -> Make:
    """Makes a model that, unlike a new model, does not repeat one token."""

    def made(pattern: str = MIXED, vocab_size: int = 61, **settings: object) -> LanguageModel:
        torch.manual_seed(0)
        model = LanguageModel(ModelConfig(pattern, vocab_size, 32, **settings)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(3)
        return model

    return made
