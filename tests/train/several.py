"""Run by test_processes.py under torchrun: the same training, shared by the processes."""

import os
import sys
from pathlib import Path

import torch

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Text
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.processes import Processes, join_processes

MODES = ["ddp-join", "ddp-pack", "fsdp-join", "fsdp-pack"]
PATTERN = """
    h3 attention ladder(lstm, passes=2)
    block_recurrent(window=4, n_states=2) block_state(window=4, variant=mf, n_states=2, d_ssm=2)
"""


def run(home: Path, mode: str, until: int, processes: Processes) -> None:
    """Train on from what lies in the folder of this mode, up to a step."""
    parallel, documents = mode.split("-")
    task = Text(path=str(home / "text"), length=16, batch_size=4, documents=documents)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(PATTERN, 256, d_model=8))
    settings = {"log_every": 1, "eval_every": 3, "save_every": 0, "warmup_steps": 2, "lr": 1e-3}
    carry = {"carry_state": True, "carry_cap": 48, "segment_len": 7, "accumulate": 2}
    carry["checkpoint_activations"] = True
    if home.name.startswith("shared"):  # the run of one process computes the whole loss at once
        carry["loss_chunk"] = 6
    config = TrainConfig(steps=9, parallel=parallel, **settings, **carry)  # type: ignore[arg-type]
    done = iter(range(until // 3 * 3 - 2, 99)) if until < 9 else iter([])
    train(
        model,
        task,
        config,
        folder=home / mode,
        processes=processes,
        interrupted=lambda: next(done, 0) == until,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_processes("cpu") as together:
        assert together.count == int(os.environ["WORLD_SIZE"]) == 2
        for mode in MODES:
            run(Path(sys.argv[1]), mode, int(sys.argv[2]), together)
