"""Time updates, or decoding, of the same small models in two checkouts of this repository.

Run it: python examples/two_checkouts.py OLD NEW
or:     python examples/two_checkouts.py OLD NEW --decode session --rows 1 --model mamba 64
or:     python examples/two_checkouts.py OLD NEW --losses --updates 3

OLD and NEW are folders with a checkout (``git worktree add OLD COMMIT`` makes one). A process for
each of them trains the model on one thread by the public functions, so times include batches,
clipping and optimizer. The processes take turns, update by update; processor time is measured, so
that other programs disturb both alike. The table shows the median update in milliseconds and the
median of the ratios of neighbouring updates; in the last line, planned updates weight the times.
Without ``--model`` and ``--task``, these are the models and tasks of ``make demo`` that
older checkouts also have.

``--decode`` times single tokens instead: by a ``Session``, or by the model's ``step_``, which keeps
nothing between tokens. A turn is ``--tokens`` tokens
after a prompt of eight; without ``--model``, one block of every layer in both checkouts decodes at
width 64.

``--losses`` compares results: the losses of the first updates of every recipe that both checkouts
have and whose data are here, each trained from the seed of its recipe as its own checkout reads it.
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

DECODED = """
import sys, time
import torch
from stateline import LanguageModel, ModelConfig
from stateline.generate import Session, prefill

pattern, how, rows, tokens, d_model = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)
torch.manual_seed(0)
model = LanguageModel(ModelConfig(pattern, vocab_size=256, d_model=d_model)).eval()
prompt = torch.randint(256, (rows, 8))

def by_session():
    session = Session(model, prefill(model, prompt))
    session.step()
    return session.step

@torch.inference_mode()
def by_step():
    state = model.init_state(rows, capacity=8 + tokens)
    token = prompt[:, 0]

    @torch.inference_mode()
    def step():
        model.step_(token, state)

    return step

begin = by_session if how == "session" else by_step
while True:
    step = begin()
    started = time.process_time()
    for _ in range(tokens):
        step()
    print((time.process_time() - started) / tokens, flush=True)
    if not sys.stdin.readline():
        break
"""

LAYERS = """
import torch
from stateline import LanguageModel, ModelConfig
from stateline.layers import LAYERS
for name in LAYERS:
    try:
        model = LanguageModel(ModelConfig(name, vocab_size=256, d_model=64)).eval()
        with torch.inference_mode():
            model.step_(torch.tensor([0]), model.init_state(1, capacity=1))
        print(name)
    except Exception:
        pass  # it has no steps, or cannot be a language model alone
"""

LOSSES = """
import sys
import torch
from stateline import TrainConfig, make_task
from stateline.compare.recipe import read_models, read_recipe
from stateline.models.factory import make_model
from stateline.train.loop import train

updates = int(sys.argv[1])
torch.set_num_threads(1)
for path in sys.argv[2:]:
    losses = []
    try:
        recipe, spec = read_recipe(path)
        (own,) = read_models([recipe])
        task = make_task(spec or "text")
        torch.manual_seed(0)
        model = make_model(task.model_config(own.pattern, dict(own.model)))
        config = TrainConfig(**{**own.train, "log_every": 1, "eval_every": 0})
        train(
            model,
            task,
            config,
            on_log=lambda metrics: losses.append(metrics.loss),
            interrupted=lambda: len(losses) >= updates,
        )
        print(*losses[:updates], flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
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
"""Updates that are not counted, in which kernels are compiled and memory is allocated."""


def environment(folder: Path) -> dict[str, str]:
    """Variables with which Python imports the code of a checkout."""
    return {**os.environ, "PYTHONPATH": str(folder.resolve() / "src")}


class Checkout:
    """A process that runs the code of a checkout, and waits after every turn.

    Args:
        folder: The checkout.
        code: What the process runs; it prints the seconds of each turn, and waits for a line.
        given: Arguments of the code.
    """

    def __init__(self, folder: Path, code: str, *given: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *given],
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._finish()

    def turn(self) -> float:
        """Run one update, or a turn of tokens; its processor time in milliseconds."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self._finish()

    def _finish(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended with code {self.process.wait()}")
        return 1e3 * float(line)


def compare(given: argparse.Namespace, code: str, case: tuple[str, ...], label: str) -> list[float]:
    """Print a line for one case; the median times of both checkouts."""
    pair = [Checkout(folder, code, *case) for folder in (given.old, given.new)]
    times = [[each.turn() for each in pair] for _ in range(WARM_UP + given.updates)]
    for each in pair:
        each.process.communicate()
    times = times[WARM_UP:]
    old, new = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    print(f"{old:8.3g}{new:8.3g}{ratio:8.2f}x  {label}", flush=True)
    return [old, new]


def compare_updates(given: argparse.Namespace) -> None:
    """Print a line for each model and task, and one for all of them."""
    print("     old     new   ratio  (milliseconds of an update)")
    sums = [0.0, 0.0]
    for task, planned in given.task or TASKS:
        for pattern, width in given.model or MODELS:
            pair = compare(given, TRAINED, (pattern, task, width), f"{pattern} on {task}")
            sums = [total + int(planned) * each for total, each in zip(sums, pair, strict=True)]
    print(f"all planned updates: {sums[0] / sums[1]:.2f}x")


def compare_decoding(given: argparse.Namespace) -> None:
    """Print a line for each model and number of rows."""
    print("     old     new   ratio  (milliseconds of a token)")
    models = given.model or [(name, "64") for name in common_layers(given.old, given.new)]
    for rows in given.rows:
        for pattern, width in models:
            case = (pattern, given.decode, str(rows), str(given.tokens), width)
            compare(given, DECODED, case, f"{pattern}, width {width}, {rows} rows")


def common_layers(old: Path, new: Path) -> list[str]:
    """Names of the layers that decode in both checkouts."""
    found = [
        subprocess.run(
            [sys.executable, "-c", LAYERS],
            env=environment(folder),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split()
        for folder in (old, new)
    ]
    return [name for name in found[0] if name in found[1]]


def compare_losses(given: argparse.Namespace) -> None:
    """Print a line for each recipe whose losses differ or cannot be computed, and their number."""
    names = sorted(
        str(path.relative_to(given.new))
        for path in (given.new / "recipes").rglob("*.yaml")
        if not {"tables", "paper"} & set(path.parts) and path.match(given.recipes)
    )
    names = [name for name in names if (given.old / name).exists()]
    found = []
    for folder in (given.old, given.new):
        arguments = [str(given.updates), *(str((folder / name).resolve()) for name in names)]
        command = [sys.executable, "-c", LOSSES, *arguments]
        run = subprocess.run(
            command, env=environment(folder), stdout=subprocess.PIPE, text=True, check=True
        )
        found.append(run.stdout.splitlines())
    same = 0
    for name, *lines in zip(names, *found, strict=True):
        try:
            old, new = ([float(loss) for loss in line.split()] for line in lines)
        except ValueError:
            print(f"{name}: {' | '.join(line[:90] for line in lines)}")
            continue
        same += old == new
        if old != new:
            apart = max(abs(a - b) / abs(a) for a, b in zip(old, new, strict=True))
            print(f"{name}: {apart:.1e} of the loss apart")
    print(f"{same} of {len(names)} recipes have the same losses to the bit")


def main(given: argparse.Namespace) -> None:
    """Compare what the options name."""
    if given.losses:
        compare_losses(given)
    else:
        (compare_decoding if given.decode else compare_updates)(given)


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--model", nargs=2, action="append", metavar=("PATTERN", "WIDTH"))
    parser.add_argument("--task", nargs=2, action="append", metavar=("TASK", "UPDATES"))
    parser.add_argument("--updates", type=int, default=20, help="or turns that are measured")
    parser.add_argument("--losses", action="store_true", help="of the recipes, in place of times")
    parser.add_argument("--recipes", default="*.yaml", help="recipes whose losses are compared")
    parser.add_argument("--decode", choices=("session", "step_"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="that decode together")
    parser.add_argument("--tokens", type=int, default=100, help="of a turn of decoding")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
