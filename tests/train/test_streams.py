"""Training with carried state on tasks whose episodes follow one another."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import IGNORE, Algorithm, RandomWalk, StreamTask
from stateline.train.config import TrainConfig
from stateline.train.folder import found
from stateline.train.loop import train
from stateline.train.metrics import TrainResult

FROZEN = 1e-30
"""A learning rate at which no weight changes."""


def algorithm(reset: bool) -> Algorithm:
    return Algorithm(statements=4, length=8, batch_size=3, reset=reset)


def random_walk(reset: bool) -> RandomWalk:
    return RandomWalk(grid=3, length=8, reset_every=10, batch_size=3, reset=reset)


MAKE = [algorithm, random_walk]

STAIRCASES = [
    "staircase(sliding_attention(window=5) h3, chunk_len=3)",
    "staircase(attention, passes=3, chunk_len=5)",
    "cached_staircase(attention, passes=2, chunk_len=3, steps=4)",
    "feedback(attention, window=6)",
    "ladder(sliding_attention(window=5), passes=3)",
]
"""In chunks that do not end where segments do."""


def model(task: StreamTask, pattern: str = "h3 lstm") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, task.vocab_size, d_model=8))


def run(task: StreamTask, trained: LanguageModel, **settings: Any) -> TrainResult:
    defaults = {"steps": 6, "warmup_steps": 0, "eval_every": 0, "log_every": 1, "save_every": 2}
    given = {"folder", "interrupted"} & settings.keys()
    where = {name: settings.pop(name) for name in given}
    return train(trained, task, TrainConfig(carry_state=True, **(defaults | settings)), **where)


def losses(task: StreamTask, pattern: str) -> list[float]:
    """Of untrained batches, as the loop counts them."""
    return [metrics.loss for metrics in run(task, model(task, pattern), lr=FROZEN).curve]


def stretches(fresh: Tensor) -> Iterator[tuple[int, int, int]]:
    """Row, first and last segment of what is read without a new beginning."""
    for row, begins in enumerate(fresh):
        starts = [*begins.nonzero().flatten().tolist(), len(begins)]
        yield from ((row, *pair) for pair in pairwise(starts))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("make", "pattern"),
    [*((make, "h3 lstm") for make in MAKE), *((random_walk, p) for p in STAIRCASES)],
)
def test_the_loss_is_that_of_the_stretches_read_as_a_whole(
    make: Any, pattern: str, reset: bool
) -> None:
    task = make(reset)
    whole, batches = model(task, pattern), [task.consecutive_batch(index) for index in range(6)]
    tokens, targets = (
        torch.as_tensor(torch.stack([b[part] for b in batches], dim=1)) for part in (0, 1)
    )
    logits = torch.empty(*tokens.shape, task.vocab_size)
    fresh = torch.stack([batch.fresh for batch in batches], dim=1)
    for row, first, last in stretches(fresh):
        read = whole(tokens[row, first:last].reshape(1, -1))
        logits[row, first:last] = read.detach().reshape(last - first, -1, task.vocab_size)
    wanted = [
        cross_entropy(logits[:, n].flatten(0, 1), targets[:, n].flatten(), ignore_index=IGNORE)
        for n in range(6)
    ]
    assert fresh[:, 1:].any() == reset
    assert losses(task, pattern) == pytest.approx([loss.item() for loss in wanted], rel=1e-5)


def saved(folder: Path) -> dict[str, Tensor]:
    """All that the newest checkpoint holds."""
    newest = found(folder)[-1]
    return load_file(newest / "model.safetensors") | load_file(newest / "training.safetensors")


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("make", MAKE)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    make: Any, reset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.tasks.synthetic.stream.SEGMENTS", 5)
    settings = {"accumulate": 2, "lr": 1e-2}  # 12 batches, in which two epochs end
    task = make(reset)
    run(task, model(task), folder=tmp_path / "whole", **settings)
    for updates in (2, 1, 99):  # then it is stopped
        again, left = make(reset), iter([False] * (updates - 1))
        run(
            again,
            model(again),
            folder=tmp_path / "parts",
            interrupted=lambda left=left: next(left, True),
            **settings,
        )
    whole, parts = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(whole[name].equal(parts[name]) for name in whole)
