"""Every public function for whole models in the modes in which programs call it.

The matrix: 21 functions here and 45 layers and wrappers in tests/layers/test_modes.py, in 12 modes
each; the gradients of layers in seven; all functions with a model inside ``torch.compile``.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline import count_parameters, load_model, load_state, save_model, save_state
from stateline.capacity import measure
from stateline.data import ByteTokenizer
from stateline.errors import InputError
from stateline.evaluate import evaluate, evaluate_by_position, token_losses
from stateline.evaluate.text import score_text
from stateline.generate import PrefixStates, Session, Speculation, generate, prefill, stream
from stateline.generate.answers import answer
from stateline.generate.drift import drift
from stateline.layers.state import fingerprint
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.probe import StatelineReader
from stateline.tasks import make_task
from stateline.train import parameter_groups
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from tests.layers.test_modes import EXACT, MODES

TASK = make_task("copying(n_letters=4, max_len=4, context_len=12)")
PROMPT = torch.tensor([[1, 2, 3]])
PAIR = [torch.tensor([1, 2, 3]), torch.tensor([1])]


def made() -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig("h3 attention mamba lstm", TASK.vocab_size, d_model=8)
    return LanguageModel(config).eval()


def kept(model: LanguageModel) -> Tensor:
    states = PrefixStates(model)
    generate(model, PROMPT, 1, prefixes=states)
    return generate(model, PROMPT, 4, prefixes=states)


def speculated(model: LanguageModel) -> Tensor:
    draft = copy.deepcopy(model)
    decoding = Speculation(model, prefill(model, PROMPT), draft, prefill(draft, PROMPT), ahead=2)
    return torch.stack([decoding.step().tokens for _ in range(4)])


def trained(model: LanguageModel) -> Tensor:
    train(model, TASK, TrainConfig(steps=2, warmup_steps=0))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved(model: LanguageModel) -> Tensor:
    save_model(model, "model")
    return load_model("model")(PROMPT)


def saved_state(model: LanguageModel) -> Tensor:
    save_state("state", prefill(model, PROMPT).model, model)
    return model.step(PROMPT[:, 0], load_state("state", model))[0]


def session(model: LanguageModel) -> Tensor:
    running = Session(model, prefill(model, PAIR))
    running.step()
    running.join(prefill(model, PROMPT))
    return running.step().logits


USES: dict[str, Callable[[LanguageModel], Any]] = {
    "forward": lambda model: model(PROMPT),
    "generate": lambda model: generate(model, PAIR, 4),
    "stream": lambda model: torch.stack([choice.tokens for choice in stream(model, PROMPT, 4)]),
    "session": session,
    "prefixes": kept,
    "speculation": speculated,
    "drift": lambda model: [list(d.answers.values()) for d in drift(model, length=2)],
    "answer": lambda model: answer(model, ByteTokenizer(), [[1, 2], [1]], [3, 2]),
    "reader": lambda model: StatelineReader("ours", model, ByteTokenizer()).answer(
        [[1], [2, 3]], [2, 1], "!", never_empty=False
    ),
    "train": trained,
    "evaluate": lambda model: evaluate(model, TASK, 4),
    "by_position": lambda model: list(evaluate_by_position(model, TASK, 4).values()),
    "score_text": lambda model: score_text(model, [PROMPT[0]]).losses.mean,
    "token_losses": lambda model: token_losses(model(PROMPT), PROMPT),
    "measure": lambda model: list(measure(model, TASK, 4).by_bits.values()),
    "save_model": saved,
    "save_state": saved_state,
    "fingerprint": fingerprint,
    "parameter_groups": lambda model: [
        [group["weight_decay"], len(group["params"])]
        for group in parameter_groups(model, TrainConfig())
    ],
    "count_parameters": lambda model: count_parameters(model.config),
    "copy": lambda model: copy.deepcopy(model)(PROMPT),
}


SLOW = ("measure", "train", "speculation", "evaluate")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=[pytest.mark.slow] * (use in SLOW)) for use in USES]
)
def test_every_function_gives_in_every_mode_what_it_gives(
    use: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted, model, (context, limit) = USES[use](made()), made(), MODES[mode]
    with context():
        found = USES[use](model)
    leaves = [pytree.tree_leaves(result) for result in (found, wanted)]
    for one, other in zip(*leaves, strict=True):
        assert type(one) is type(other)
        if isinstance(one, str):
            assert limit > EXACT or one == other
        elif limit == EXACT:  # else, another number may be largest
            torch.testing.assert_close(one, other, rtol=limit, atol=limit, check_dtype=False)


@pytest.mark.slow
@pytest.mark.usefixtures("unannotated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads that of inputs
@pytest.mark.parametrize("use", USES)
def test_every_function_takes_a_compiled_model(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    wanted = USES[use](made())
    found = USES[use](torch.compile(made(), backend="eager"))  # type: ignore[arg-type]
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert type(one) is type(other)
        if isinstance(one, str):
            assert one == other
        else:
            torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "default device"])
def test_training_takes_gradients_in_every_mode(mode: str) -> None:
    model, other = made(), made()
    trained(other)
    with MODES[mode][0]():
        trained(model)
    assert all(p.equal(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_of_inference_mode_are_not_trained() -> None:
    with torch.inference_mode():
        model = made()
    with pytest.raises(InputError, match=r"made inside torch\.inference_mode: make or load it out"):
        train(model, TASK, TrainConfig(steps=1))
