"""Train the H3 of HazyResearch/safari on associative recall or the induction head.

Run it: git clone https://github.com/HazyResearch/safari
        pip install hydra-core einops opt_einsum
        python examples/official_h3.py safari --task recall --seeds 0 1 2

Model and data are official code, which runs here without Lightning, GPU or compiled kernels. The
parameter groups, the schedule and the batches are the ones of its configurations
(``experiment/synthetics``). A seed fixes weights, order, masks and examples; official runs have the
same examples for every seed. The official score is the score of the best epoch on 500 examples; it
is recorded, too.

With ``--record FILE``, finished seeds are added to a table, from which the paper's page is made.
"""

import argparse
import importlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stateline.papers.record import RecordedRow, TableRecord, read_table, write_table
from stateline.train.environment import environment

RATE, DECAY, BATCH, EXAMPLES, TESTS = 5e-4, 0.1, 32, 5000, 500


class Setting(NamedTuple):
    """An official configuration, and the scores in the paper."""

    method: str
    vocab_size: int
    length: int
    epochs: int
    schedule: str
    paper: list[float | None]

    @property
    def steps(self) -> int:
        """Updates of a run; the incomplete batch of an epoch is one."""
        return self.epochs * math.ceil(EXAMPLES / BATCH)


SETTINGS = {
    "recall": Setting("assoc_recall", 10, 20, 200, "linear", [99.8, 98.4, None]),
    "induction": Setting("induction_head", 20, 30, 400, "cosine", [100.0, None, None]),
}


def main(given: argparse.Namespace) -> None:
    """Train the seeds one after the other, and record each."""
    torch.set_num_threads(1)
    simple_lm, synthetics = official(given.checkout)
    setting = SETTINGS[given.task]
    for seed in given.seeds:
        started = time.process_time()
        torch.manual_seed(seed)
        layer = {"_name_": "h3", "d_state": 64, "head_dim": 1, "mode": "diag", "lr": RATE}
        model = simple_lm.SimpleLMHeadModel(
            **{"d_model": 32, "n_layer": 2, "d_inner": 128, "vocab_size": setting.vocab_size},
            **{"layer": layer | {"measure": "diag-lin"}, "embed_dropout": 0.1},
        )
        scores = train(model, setting, *data(synthetics, setting, seed), name=f"seed {seed}")
        if given.record:
            size = sum(parameter.numel() for parameter in model.parameters())
            seconds = time.process_time() - started
            write_table(given.record, recorded(given, seed, scores, size, seconds))


def official(checkout: Path) -> tuple[ModuleType, ModuleType]:
    """The modules of the model and of the data, without packages that they do not need here."""
    for unused in ("pytorch_lightning", "pytorch_lightning.utilities", "torchvision"):
        sys.modules[unused] = MagicMock()
    layers, loaders = ModuleType("torchvision.ops"), ModuleType("src.dataloaders")
    vars(layers)["StochasticDepth"] = lambda *_, **__: nn.Identity()  # its probability is 0
    loaders.__path__ = [str(checkout / "src" / "dataloaders")]
    sys.modules |= {"torchvision.ops": layers, "src.dataloaders": loaders}
    sys.path.insert(0, str(checkout))
    names = "src.models.sequence.simple_lm", "src.dataloaders.synthetics"
    return importlib.import_module(names[0]), importlib.import_module(names[1])


Examples = tuple[Tensor, Tensor]
"""Tokens and targets."""


def data(synthetics: ModuleType, setting: Setting, seed: int) -> tuple[Examples, list[Examples]]:
    """Training examples, and tests at the trained and at twice the trained length."""
    drawn = []
    for length in (setting.length, 2 * setting.length):
        module = synthetics.ICLDataModule(
            **{"num_examples": EXAMPLES, "num_test_examples": TESTS, "seed": seed},
            **{"vocab_size": setting.vocab_size, "copy_method": setting.method},
            **{"input_seq_len": setting.length, "test_seq_len": length},
        )
        module.setup()
        drawn.append(module.dataset)
    return drawn[0]["train"].tensors, [own["test"].tensors for own in drawn]


def train(
    model: nn.Module, setting: Setting, examples: Examples, tests: list[Examples], name: str
) -> list[float]:
    """Both scores after the last epoch, and the best of all epochs at the trained length."""
    best, update = 0.0, updates(model, setting)
    for epoch in range(1, setting.epochs + 1):
        model.train()
        for rows in torch.randperm(EXAMPLES).split(BATCH):
            tokens, targets = (own[rows] for own in examples)
            loss = F.cross_entropy(model(tokens)[0].logits.mT, targets)
            next(update)(loss)
        scores = [score(model, *test) for test in tests]
        best = max(best, scores[0])
        if epoch % 10 == 0:
            shown = ", ".join(f"{own:.1f} %" for own in scores)
            print(f"{name}, epoch {epoch}: loss {loss.item():.3f}, {shown}", flush=True)
    return [*scores, best]


def updates(model: nn.Module, setting: Setting) -> Iterator[Callable[[Tensor], None]]:
    """Yield, for each step, a function that makes the update from the loss."""
    special = [p for p in model.parameters() if hasattr(p, "_optim")]  # transitions, steps, inputs
    plain = [p for p in model.parameters() if not hasattr(p, "_optim")]
    groups: list[dict[str, Any]] = [{"params": plain}, {"params": special, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * share(setting, step)
        yield update


def share(setting: Setting, step: int) -> float:
    """The learning rate of update number ``step``, as a fraction of the highest."""
    warmup, first = setting.steps // 10, 1e-6 / RATE if setting.schedule == "cosine" else 0.0
    if step < warmup:
        return first + (1 - first) * step / warmup
    if setting.schedule == "linear":
        return (setting.steps - step) / (setting.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / setting.steps))


@torch.no_grad()
def score(model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    """Percentage of the answers that are right."""
    model.eval()
    right = model(tokens)[0].logits.argmax(2) == targets
    return 100 * right[targets >= 0].double().mean().item()


def recorded(
    given: argparse.Namespace, seed: int, scores: list[float], parameters: int, seconds: float
) -> TableRecord:
    """The table with one more seed."""
    setting, figures = SETTINGS[given.task], {seed: scores}
    if given.record.exists():
        row = read_table(given.record).rows[0]
        before = zip(*row.values, strict=True)
        figures = {**dict(zip(row.seeds, map(list, before), strict=True)), **figures}
        seconds += row.seconds or 0.0
    command = ["git", "-C", str(given.checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    seeds = " ".join(map(str, sorted(figures)))
    return TableRecord(
        table="",
        size="laptop",
        command=f"python examples/official_h3.py safari --task {given.task} --seeds {seeds}",
        created=datetime.now(UTC).date().isoformat(),
        environment={**environment(), "safari": commit},
        columns=[
            f"score at {setting.length} (%)",
            f"score at {2 * setting.length} (%)",
            f"best epoch at {setting.length} (%)",
        ],
        rows=[
            RecordedRow(
                label="official code, here",
                seeds=sorted(figures),
                values=[list(own) for own in zip(*map(figures.get, sorted(figures)), strict=True)],
                paper=setting.paper,
                parameters=parameters,
                updates=setting.steps,
                seconds=round(seconds, 1),
            )
        ],
    )


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--task", choices=[*SETTINGS], default="recall")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--record", type=Path)
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
