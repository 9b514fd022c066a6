"""Run by test_resume.py: a training run that is killed again and again, beside one that is not.

It forks, since a child that is killed takes nothing with it, and needs no start of Python.
"""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Text
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.metrics import Metrics

torch.set_num_threads(1)
STEPS, KILLS = 80, 8


def run(folder: Path, kill_after: int) -> None:
    """Train on from what lies in the folder, to be killed a moment after some steps."""
    file = folder.parent / "text.txt"
    task = Text(path=str(file), length=16, batch_size=4)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 attention(position=rope) lstm", 256, d_model=8))
    settings = {"log_every": 1, "eval_every": 0, "save_every": 2, "warmup_steps": 5, "lr": 1e-2}
    carry = {"carry_state": True, "carry_cap": 48, "segment_len": 7, "accumulate": 2}
    config = TrainConfig(steps=STEPS, **settings, **carry)

    seen: list[Metrics] = []

    def note(metrics: Metrics) -> None:
        seen.append(metrics)
        if len(seen) == kill_after:
            after = random.uniform(0, 0.005)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()

    train(model, task, config, folder=folder, on_log=note)


def in_child(folder: Path, kill_after: int) -> int:
    """The signal that ended it, or 0."""
    if not (child := os.fork()):
        run(folder, kill_after)
        os._exit(0)
    return os.waitpid(child, 0)[1] & 0x7F


if __name__ == "__main__":
    home = Path(sys.argv[1])
    (home / "text.txt").write_bytes(bytes(97 + n * n % 23 for n in range(2000)))
    ends = [in_child(home / "whole", 0)]
    ends += [in_child(home / "killed", random.randint(1, 8)) for _ in range(KILLS)]
    ends.append(in_child(home / "killed", 0))
    sys.stdout.write(json.dumps(ends))
