"""Run by test_resume.py: a training run that is killed again and again, beside one that is not.

It forks, since a child that is killed takes nothing with it, and needs no start of Python.
"""

import json
import math
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Mixture, Task, Text
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.metrics import Metrics
from stateline.train.update import Updater

torch.set_num_threads(1)
STEPS, KILLS = 80, 8
CHOOSES = False
"""Whether the run has averages, a best checkpoint, skipped updates and a mixture of texts."""


def run(folder: Path, kill_after: int) -> None:
    """Train on from what lies in the folder, to be killed a moment after some steps."""
    file = folder.parent / "text.txt"
    task: Task = Text(path=str(file), length=16, batch_size=4)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 attention(position=rope) lstm", 256, d_model=8))
    settings: dict[str, Any] = {
        "log_every": 1,
        "eval_every": 0,
        "save_every": 2,
        "warmup_steps": 5,
        "lr": 1e-2,
    }
    carry: dict[str, Any] = {
        "carry_state": True,
        "carry_cap": 48,
        "segment_len": 7,
        "accumulate": 2,
    }
    if CHOOSES:
        task = Mixture(texts=f"{file}:3 {file.with_name('other.txt')}:1", length=16, batch_size=4)
        carry = {"ema": 0.9, "keep_best": True, "max_skipped": 2}
        settings["eval_every"] = 3
        spoil_every_seventh_update()
    config = TrainConfig(steps=STEPS, **settings, **carry)

    seen: list[Metrics] = []

    def note(metrics: Metrics) -> None:
        seen.append(metrics)
        if len(seen) == kill_after:
            after = random.uniform(0, 0.005)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()

    train(model, task, config, folder=folder, on_log=note)


def spoil_every_seventh_update() -> None:
    """Its gradient is NaN, so that it is skipped."""
    call, read = Updater.__call__, Updater._read
    now = 0

    def counted(update: Updater, micro_batches: Any, step: int) -> tuple[float, float]:
        nonlocal now
        now = step
        return call(update, micro_batches, step)

    def spoilt(update: Updater, losses: Any, norm: Any) -> tuple[float, float]:
        loss, size = read(update, losses, norm)
        return loss, math.nan if now % 7 == 3 else size

    Updater.__call__, Updater._read = counted, spoilt  # type: ignore[method-assign]


def in_child(folder: Path, kill_after: int) -> int:
    """The signal that ended it, or 0."""
    if not (child := os.fork()):
        run(folder, kill_after)
        os._exit(0)
    return os.waitpid(child, 0)[1] & 0x7F


if __name__ == "__main__":
    home, CHOOSES = Path(sys.argv[1]), sys.argv[2] == "chooses"
    (home / "text.txt").write_bytes(bytes(97 + n * n % 23 for n in range(2000)))
    (home / "other.txt").write_bytes(bytes(97 + n * n % 19 for n in range(2000)))
    ends = [in_child(home / "whole", 0)]
    ends += [in_child(home / "killed", random.randint(1, 8)) for _ in range(KILLS)]
    ends.append(in_child(home / "killed", 0))
    sys.stdout.write(json.dumps(ends))
