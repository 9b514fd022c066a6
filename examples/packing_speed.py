"""Speed of training on short documents: joined, each in windows of its own, or packed.

Run it: python examples/packing_speed.py

    python examples/packing_speed.py h3 mamba2 --rounds 9
    python examples/packing_speed.py mamba2*2 --names       # documents of some ten bytes
    python examples/packing_speed.py "h3 attention h3 lstm" --cut_once

The documents are the functions of the standard library: a third of them as their names, a third as
a question and its answer (what does NAME do? the first line of its docstring), a third as their
source. Updates of the three ways take turns on one thread, and processor time is measured. With
``--cut_once``, the last columns compare packed rows whose documents are cut out once, before the
first layer, with packed rows of which each layer cuts out or reads the documents itself.
"""

import argparse
import ast
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stateline.data.token_text import TokenText
from stateline.layers.documents import Documents as Cut
from stateline.models.factory import make_model
from stateline.models.presets import configure
from stateline.tasks.base import IGNORE, Task
from stateline.tasks.text.corpus import Documents, TextTask
from stateline.train.batches import Batches
from stateline.train.config import TrainConfig
from stateline.train.loop import ALONE
from stateline.train.update import Updater

WAYS: tuple[Documents, ...] = ("join", "separate", "pack")


class CutsOnce(torch.nn.Module):
    """A stack whose documents are cut out before its first layer."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: torch.Tensor, starts: Any = None) -> torch.Tensor:
        """Outputs of the stack."""
        if starts is None:
            return self.stack(x)
        return Cut.of(starts, x).whole.apply(x, lambda _, rows: self.stack(rows))


class Short(TextTask):
    """Bytes of short documents."""

    title = about = ""

    def __init__(self, texts: list[bytes], documents: Documents, length: int, rows: int) -> None:
        self.seed, self.train_length, self.batch_size = 0, length, rows
        self.documents = documents
        tokens = np.frombuffer(b"".join(texts), dtype=np.uint8)
        borders = np.cumsum([0, *map(len, texts)])
        text = TokenText([len(tokens)], lambda _: tokens, borders)
        self._training = self._held_out = text.joined() if documents == "join" else text


def documents_of_library(*, names: bool = False) -> list[bytes]:
    """Names, questions with answers, and functions, in turn; or names alone."""
    texts = list[bytes]()
    for name, meaning, source in _functions():
        kinds = (name, f"What does {name} do? {meaning}", source)
        kinds = (name,) * 3 if names else kinds
        texts.append(f"{kinds[len(texts) % 3]}\n".encode())
    return texts


def _functions() -> Iterator[tuple[str, str, str]]:
    """Name, first line of the docstring, and source of every function that has a docstring."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
                yield node.name, said.splitlines()[0], ast.get_source_segment(text, node) or ""


def scored(task: Task, batches: int = 8) -> float:
    """Share of the positions that have a target."""
    targets = torch.cat([task.train_batch(index).targets.flatten() for index in range(batches)])
    return float((targets != IGNORE).float().mean())


def speeds(pattern: str, tasks: dict[str, Short], config: TrainConfig, width: int) -> list[str]:
    """A line of the table: positions per second and targets per second, relative to the first."""
    updates = {}
    for way, task in tasks.items():
        torch.manual_seed(0)
        model = make_model(configure(pattern, vocab_size=256, d_model=width)).train()
        if way == "cut once":
            model.stack = CutsOnce(model.stack)
        updates[way] = Updater(model, task, config, ALONE), Batches(task, config, ALONE)
    seconds: dict[str, list[float]] = {way: [] for way in tasks}
    for step in range(config.steps):  # the first round compiles kernels
        for way, (update, batches) in updates.items():
            micro_batches = batches.update(step)
            started = time.process_time()
            update(micro_batches, step)
            seconds[way].append(time.process_time() - started)
    times = {way: own[1:] for way, own in seconds.items()}
    first, *others = tasks
    one = tasks[first]
    speed = one.train_length * one.batch_size / statistics.median(times[first])
    cells = [pattern, f"{speed:,.0f}"]
    for way in others:
        pairs = zip(times[first], times[way], strict=True)
        ratios = sorted(a / b for a, b in pairs)
        low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        cells.append(f"{middle * scored(tasks[way]):.2f}")
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="layers of the models")
    parser.add_argument("--length", type=int, default=2048, help="positions in a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch")
    parser.add_argument("--d_model", type=int, default=128, help="width")
    parser.add_argument("--rounds", type=int, default=7, help="updates that are timed")
    parser.add_argument("--names", action="store_true", help="names of functions alone")
    parser.add_argument("--cut_once", action="store_true", help="compare two ways to cut")
    parser.add_argument("--carry_state", action="store_true", help="rows continue the last batch")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    carry: dict[str, Any] = {"carry_state": True, "carry_cap": 1 << 20} if given.carry_state else {}
    config = TrainConfig(steps=given.rounds + 1, warmup_steps=0, **carry)
    texts = documents_of_library(names=given.names)
    ways: dict[str, Documents] = {way: way for way in WAYS}
    if given.cut_once:
        ways = {"pack": "pack", "cut once": "pack"}
    tasks = {name: Short(texts, way, given.length, given.rows) for name, way in ways.items()}
    shares = ", ".join(f"{way} {scored(task):.1%}" for way, task in tasks.items())
    print(f"{len(texts):,} documents of {np.mean([*map(len, texts)]):.0f} bytes on average")
    print(f"positions scored: {shares}\n")
    first, *others = ways
    titles = ["model", f"{first}, positions/s"]
    for way in others:
        titles += [f"{way} / {first}", "its targets"]
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for pattern in given.patterns or ["h3*2", "mamba2*2", "gated_delta_net*2", "attention*2"]:
        print(f"| {' | '.join(speeds(pattern, tasks, config, given.d_model))} |", flush=True)


if __name__ == "__main__":
    main()
