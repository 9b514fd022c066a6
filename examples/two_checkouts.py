"""Time updates of the same small models in two checkouts of this repository.

Run it: python examples/two_checkouts.py OLD NEW

OLD and NEW are folders with a checkout (``git worktree add OLD COMMIT`` makes one). A process for
each of them trains the model on one thread by the public functions, so batches, clipping and
optimizer count. The processes take turns, update by update, and processor time is measured, so
that other programs disturb both alike. The table shows the median update in milliseconds and the
median of the ratios of neighbouring updates; the last line weighs the times by the planned updates.
Without ``--model`` and ``--task``, these are the models and tasks of ``make demo`` that
older checkouts also have.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

TRAINED = """
import sys, time
import torch
from stateline import LanguageModel, ModelConfig, TrainConfig, make_task
from stateline.train.loop import train
try:
    from stateline.allocator import keep_freed_memory
    keep_freed_memory()
except ImportError:
    pass  # checkouts before the command line kept freed memory

pattern, task, d_model = sys.argv[1], make_task(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = LanguageModel(ModelConfig(pattern, vocab_size=task.vocab_size, d_model=d_model))

def turn():
    global started
    print(time.process_time() - started, flush=True)
    go = sys.stdin.readline()
    started = time.process_time()
    return not go

started = time.process_time()
train(model, task, TrainConfig(steps=1_000_000), interrupted=turn)
"""

HARD_ALIBI = "attention(position=hard_alibi, n_heads=8)"
MODELS = (
    (f"{HARD_ALIBI}*2", "48"),
    ("lstm*2", "60"),
    ("s4d*2", "44"),
    ("h3*2", "36"),
    (f"h3 {HARD_ALIBI}", "40"),
    (f"lstm {HARD_ALIBI}", "56"),
)
TASKS = (
    ("associative_recall", "1500"),
    ("copying(n_letters=8, max_len=8, context_len=20)", "1200"),
    ("text(length=128)", "250"),
)

WARM_UP = 3
"""Updates that are not counted: kernels are compiled, memory is allocated."""


class Checkout:
    """A process that trains with the code of a checkout, and waits after every update.

    Args:
        folder: The checkout.
        model: Pattern, task and width.
    """

    def __init__(self, folder: Path, *model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINED, *model],
            env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def update(self) -> float:
        """Run one update; its processor time in milliseconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the training ended with code {self.process.wait()}")
        print(file=self.process.stdin, flush=True)
        return 1e3 * float(line)


def main(given: argparse.Namespace) -> None:
    """Print a line for each model and task, and one for all of them."""
    print("     old     new   ratio  (milliseconds of an update)")
    sums = [0.0, 0.0]
    for task, planned in given.task or TASKS:
        for pattern, width in given.model or MODELS:
            pair = [Checkout(folder, pattern, task, width) for folder in (given.old, given.new)]
            times = [[each.update() for each in pair] for _ in range(WARM_UP + given.updates)]
            for each in pair:
                each.process.communicate()
            times = times[WARM_UP:]
            old, new = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(a / b for a, b in times)
            print(f"{old:8.1f}{new:8.1f}{ratio:8.2f}x  {pattern} on {task}", flush=True)
            sums = [sums[0] + int(planned) * old, sums[1] + int(planned) * new]
    print(f"all planned updates: {sums[0] / sums[1]:.2f}x")


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--model", nargs=2, action="append", metavar=("PATTERN", "WIDTH"))
    parser.add_argument("--task", nargs=2, action="append", metavar=("TASK", "UPDATES"))
    parser.add_argument("--updates", type=int, default=20, help="that are measured")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
