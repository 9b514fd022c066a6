"""A model inside a wrapper of PyTorch is refused in one line that names ``.module``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stateline import check_layer, save_model, save_state
from stateline.capacity import measure
from stateline.data import ByteTokenizer
from stateline.errors import InputError
from stateline.evaluate import evaluate, evaluate_by_position
from stateline.evaluate.text import score_text
from stateline.generate import PrefixStates, Session, generate, prefill
from stateline.generate.answers import answer
from stateline.generate.drift import drift
from stateline.generate.model import Model
from stateline.layers.state import fingerprint
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.loop import train

TASK = make_task("copying(n_letters=4, max_len=4, context_len=12)")
MODEL = LanguageModel(ModelConfig("lstm", TASK.vocab_size, d_model=8)).eval()
PROMPT = torch.zeros(1, 3, dtype=torch.int64)


class Distributed(nn.Module):
    """As DistributedDataParallel, without its processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


USES: dict[str, Callable[[Any], object]] = {
    "generate": lambda model: generate(model, PROMPT, 2),
    "prefill": lambda model: prefill(model, PROMPT),
    "session": lambda model: Session(model, prefill(MODEL, PROMPT)),
    "prefixes": PrefixStates,
    "drift": lambda model: list(drift(model, length=2)),
    "answer": lambda model: answer(model, ByteTokenizer(), [[1]], [1]),
    "model": lambda model: Model(model, ByteTokenizer()),
    "train": lambda model: train(model, TASK, TrainConfig(steps=1)),
    "evaluate": lambda model: evaluate(model, TASK, 4),
    "by_position": lambda model: evaluate_by_position(model, TASK, 4),
    "score_text": lambda model: score_text(model, [PROMPT[0]]),
    "measure": lambda model: measure(model, TASK, 4),
    "save_model": lambda model: save_model(model, "never"),
    "save_state": lambda model: save_state("never", MODEL.init_state(1), model),
    "fingerprint": fingerprint,
    "check_layer": partial(check_layer, length=0),
}


@pytest.mark.parametrize("wrapper", [AveragedModel, nn.DataParallel, Distributed])
@pytest.mark.parametrize("use", USES)
def test_wrapped_models_are_refused_by_name(
    use: str, wrapper: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"got a {wrapper.__name__} around it: give its \.module"):
        USES[use](wrapper(MODEL))
    assert not list(tmp_path.iterdir())


def test_a_model_of_transformers_is_not_made_of_a_wrapper() -> None:
    pytest.importorskip("transformers")
    from stateline import hf

    with pytest.raises(InputError, match=r"got a AveragedModel around it: give its \.module"):
        hf.wrap(AveragedModel(MODEL))  # type: ignore[arg-type]
