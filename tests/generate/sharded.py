"""Run by test_weights.py under torchrun: compares sessions of sharded models and whole ones."""

import copy
import json
import sys

import torch

from stateline.generate import prefill
from stateline.generate.session import Session
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.ops import use_backend
from stateline.train.processes import Processes, join_processes
from stateline.train.segment import Segment


def logits(model: LanguageModel, steps: int = 6) -> torch.Tensor:
    """What a session gives after a prompt."""
    session = Session(model, prefill(model, torch.tensor([[1, 2, 3], [4, 5, 6]])))
    return torch.stack([session.step().logits for _ in range(steps)])


def difference(pattern: str, backend: str, processes: Processes) -> float:
    """Largest difference between the logits of a sharded model and of the whole model."""
    torch.manual_seed(0)
    whole = LanguageModel(ModelConfig(pattern, 11, d_model=16)).eval()
    sharded = copy.deepcopy(whole)
    processes.wrap(Segment(sharded), processes.count)
    with use_backend(backend):
        return float((logits(sharded) - logits(whole)).abs().max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend, *patterns = sys.argv[1:]
    with join_processes("cpu") as processes:
        found = {
            pattern: processes.sum(difference(pattern, backend, processes)) for pattern in patterns
        }
        if processes.main:
            sys.stdout.write(json.dumps(found))
