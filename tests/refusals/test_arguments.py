"""Public functions refuse an argument of another kind in one line, at their door."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stateline.errors import InputError
from stateline.evaluate import evaluate, evaluate_by_position
from stateline.generate import Model, Session, extend, generate, prefill
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import SequenceClassifier, SequenceRegressor
from stateline.models.size import count_parameters, match_width
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.loop import train

CONFIG = ModelConfig("lstm", 11, d_model=8)
TOKENS = torch.tensor([[1, 2]])
Call = Callable[[LanguageModel, Any], object]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _, no: make_task(no), "text must be a str, got a "),
        (lambda _, no: count_parameters(no), "config must be a ModelConfig, got a "),
        (lambda _, no: match_width(no, 1000), "config must be a ModelConfig, got a "),
        (lambda _, no: SequenceClassifier(no), "config must be a HeadConfig, got a "),
        (lambda _, no: SequenceRegressor(no), "config must be a HeadConfig, got a "),
        (lambda _, no: train(no, make_task("copying"), TrainConfig()), "model must be a Module"),
        (lambda model, no: train(model, no, TrainConfig()), "task must be a Task, got a "),
        (lambda model, no: train(model, make_task("copying"), no), "config must be a TrainConfig"),
        (lambda _, no: evaluate(no, make_task("copying"), 8), "model must be a Module, got a "),
        (lambda model, no: evaluate(model, no, 8), "task must be a Task, got a "),
        (lambda model, no: evaluate_by_position(model, no, 8), "task must be a Task, got a "),
        (lambda _, no: Model(no), "model must be a Module, got a "),
        (lambda model, no: Session(no, prefill(model, TOKENS)), "model must be a Module, got a "),
        (lambda _, no: prefill(no, TOKENS), "model must be a Module, got a "),
        (lambda model, no: extend(no, prefill(model, TOKENS), TOKENS), "model must be a Module"),
        (lambda _, no: generate(no, TOKENS, 2), "model must be a Module, got a "),
    ],
)
@pytest.mark.parametrize("no", [3, None])
def test_an_argument_of_another_kind_is_refused(call: Call, message: str, no: object) -> None:
    with pytest.raises(InputError, match=message):
        call(LanguageModel(CONFIG).eval(), no)
