"""Measure what saving and resuming cost the processes of a sharded run.

Run it: python examples/checkpoint_costs.py h3-125m --processes 2

Processes make a few updates of a model with FSDP, save a checkpoint, go on with updates while it is
written, save once more, and resume. Each prints the bytes of its own part of weights and moments,
and then: how long training paused (``save``), and the processor time of the pause, which matters on
a busy machine; how long an update took before and while the checkpoint was written; when the
checkpoint was complete; how much more memory saving took than updates alone; and the time and
memory of resuming.
"""

import argparse
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stateline import LanguageModel
from stateline.allocator import keep_freed_memory
from stateline.bench.memory import peak_bytes
from stateline.models.presets import configure
from stateline.tasks import Text
from stateline.train.config import TrainConfig
from stateline.train.loop import Trainer
from stateline.train.processes import Processes, join_processes, own_rows

MIB = 1 << 20


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long the work takes."""
    started = clock()
    work()
    return clock() - started


def trainer(pattern: str, home: Path, processes: Processes) -> Trainer:
    """A sharded run of a model on a little text."""
    torch.manual_seed(0)
    model = LanguageModel(configure(pattern, vocab_size=256)).train()
    task = Text(path=str(home / "text.txt"), length=16, batch_size=processes.count)
    config = TrainConfig(steps=1000, parallel="fsdp", keep=1)
    return Trainer(model, task, config, processes, home, None)


def update(run: Trainer) -> None:
    """Make one update, and commit a checkpoint that all have written."""
    run._update()
    run.progress.steps += 1
    run._any(False)


def saved(run: Trainer) -> str:
    """What a checkpoint costs this process, in words."""
    times: dict[str, float] = {}
    during: list[float] = []

    def work() -> None:
        started = time.perf_counter()
        times["work"] = seconds(lambda: times.update(save=seconds(run.save)), time.thread_time)
        while run.saving is not None:
            during.append(seconds(lambda: update(run)))
        times["whole"] = time.perf_counter() - started

    alone: list[float] = []
    usual = peak_bytes(lambda: alone.extend(seconds(lambda: update(run)) for _ in range(3))) or 0
    memory = (peak_bytes(work) or 0) - usual
    return (
        f"save {times['save']:.2f} s (processor {times['work']:.2f} s), update {min(alone):.2f} s "
        f"alone, at most {max(during, default=0):.2f} s meanwhile, whole after "
        f"{times['whole']:.1f} s, {memory / MIB:+,.0f} MiB"
    )


def measure(pattern: str, home: Path) -> None:
    """Train, save and resume as one of several processes, and print what it costs."""
    keep_freed_memory()  # as the command does
    with join_processes("cpu") as processes:
        run = trainer(pattern, home, processes)
        for _ in range(2):
            update(run)
        moments = [m for state in run.update.optimizer.state.values() for m in state.values()]
        part = sum(own_rows(t)[0].nbytes for t in (*run.model.parameters(), *moments))
        lines = [f"own part {part / MIB:,.0f} MiB", saved(run), saved(run)]
        del run, moments
        gc.collect()
        again = trainer(pattern, home, processes)
        taken: list[float] = []

        def read() -> None:
            taken.append(seconds(again.resume))

        memory = peak_bytes(read) or 0
        lines.append(f"resume {taken[0]:.1f} s, +{memory / MIB:,.0f} MiB")
        # In one write: `print` may write its newline apart, and another process in between.
        sys.stdout.write("".join(f"process {processes.rank}: {line}\n" for line in lines))


def main(given: argparse.Namespace) -> None:
    """Start the processes in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=given.folder) as home, socket.socket() as free:
        (Path(home) / "text.txt").write_bytes(bytes(97 + n * n % 23 for n in range(2000)))
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        command = [sys.executable, __file__, given.pattern, "--home", home]
        common = {**os.environ, **place, "WORLD_SIZE": str(given.processes)}
        ranks = [{**common, "RANK": str(rank)} for rank in range(given.processes)]
        for process in [subprocess.Popen(command, env=rank) for rank in ranks]:
            process.wait()


def parser() -> argparse.ArgumentParser:
    """Declare the options."""
    options = argparse.ArgumentParser()
    options.add_argument("pattern", help="a pattern or a preset")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--folder", help="where the checkpoints are written for a while")
    options.add_argument("--home", help=argparse.SUPPRESS)
    return options


if __name__ == "__main__":
    given = parser().parse_args()
    if given.home:
        measure(given.pattern, Path(given.home))
    else:
        main(given)
