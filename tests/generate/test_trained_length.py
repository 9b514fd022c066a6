"""Texts beyond those of a published model's training are read, with a warning."""

import logging
from collections.abc import Callable

import pytest
import torch

from stateline.data import ByteTokenizer
from stateline.evaluate import score_text
from stateline.generate import generate
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.probe.reader import StatelineReader


def read_by_probe(model: LanguageModel, n: int) -> None:
    reader = StatelineReader("model", model, ByteTokenizer())
    reader.answer([[1] * (n - 2)], [2], "\n", never_empty=False)


@pytest.mark.parametrize(
    "read",
    [
        lambda model, n: generate(model, torch.ones(1, n - 2).long(), 3),
        lambda model, n: score_text(model, [torch.ones(n + 1).long()]),
        read_by_probe,
    ],
    ids=["generate", "evaluate", "probe"],
)
def test_a_text_beyond_the_training_is_warned_of(
    read: Callable[[LanguageModel, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = LanguageModel(ModelConfig("attention", 256, 8, trained_len=8)).eval()
    with caplog.at_level(logging.WARNING, "stateline"):
        read(model, 8)
        assert not caplog.records
        read(model, 9)
    assert "trained on texts of up to 8 tokens, this one may have 9" in caplog.text
