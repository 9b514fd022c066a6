"""Run by test_shared.py: processes that share a training, forked, since none must start Python.

``forked.py mesh HOME SETTINGS``: a run of one process, and of four that hold two sharded copies or
as the settings say.
``forked.py kill HOME``: a run of two processes, one of which is killed again and again, beside one
that is not. ``forked.py reshard HOME``: a checkpoint of two processes is read and written by one,
and then by four, some of which hold copies. ``forked.py full HOME``: one of two processes cannot
write its second checkpoint. ``forked.py slow HOME``: two processes write to a disk that is slower
than their next updates. ``forked.py left HOME``: one of two processes is killed, and the other goes
on until it notices.
"""

import json
import os
import random
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Answers, Task, Text
from stateline.train import checkpoint
from stateline.train.config import TrainConfig
from stateline.train.loop import Trainer, train
from stateline.train.processes import Processes, join_processes

torch.set_num_threads(1)
STEPS, KILLS = 100, 8
NEVER = 1 << 30


def together(count: int, work: Callable[[Processes], None]) -> list[int]:
    """Do the work in so many processes; their signals, 0 where there was none."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    children = []
    for rank in range(count):
        if child := os.fork():
            children.append(child)
            continue
        os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            with join_processes("cpu") as processes:
                work(processes)
        except InputError as error:
            (home / "error").write_text(str(error))
            os._exit(2)
        except SystemExit as ending:
            os._exit(ending.code)
        os._exit(0)
    ends = {}
    while len(ends) < count:
        child, status = os.wait()
        ends[child] = status & 0x7F
        if status:  # as torchrun does, which does not leave it to the others to notice
            for other in set(children) - ends.keys():
                os.kill(other, signal.SIGTERM)
    return [ends[child] for child in children]


def parts(
    folder: Path,
    pattern: str = "h3 attention(position=rope) lstm",
    examples: bool = False,
    **settings: Any,
) -> tuple[LanguageModel, Task, TrainConfig]:
    """What is trained, on a text or on packed examples."""
    task: Task = Text(path=str(folder.parent / "text.txt"), length=16, batch_size=4)
    if examples:
        path = str(folder.parent / "sums.jsonl")
        task = Answers(path=path, length=32, batch_size=4, answered=3)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(pattern, 256, d_model=8))
    shared = {"log_every": 1, "eval_every": 0, "save_every": 2, "warmup_steps": 5, "lr": 1e-2}
    carry = {"carry_state": True, "carry_cap": 48, "segment_len": 7, "accumulate": 2}
    return model, task, TrainConfig(**{"steps": STEPS, **shared, **carry, **settings})


def trained(folder: Path, processes: Processes, kill_after: int = NEVER, **settings: Any) -> None:
    """Train on from what lies in the folder, to be killed a moment after some updates."""
    updates = 0

    def count() -> bool:
        nonlocal updates
        updates += 1
        if updates == kill_after:
            after = random.uniform(0, 0.03)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return False

    train(*parts(folder, **settings), folder=folder, processes=processes, interrupted=count)


def mesh(home: Path) -> list[list[int]]:
    """Signals of the runs."""
    settings = {"steps": 6, "carry_state": False, "carry_cap": None} | json.loads(sys.argv[3])
    return [
        together(1, lambda p: trained(home / "alone", p, **settings)),
        together(4, lambda p: trained(home / "mesh", p, **{"shard": 2} | settings)),
    ]


def kill(home: Path) -> list[list[int]]:
    """Signals of the runs."""
    ends = [together(2, lambda p: trained(home / "whole", p, parallel="fsdp"))]
    for _ in range(KILLS):
        victim, after = random.randrange(2), random.randint(1, 8)

        def work(processes: Processes, victim: int = victim, after: int = after) -> None:
            mine = after if processes.rank == victim else NEVER
            trained(home / "killed", processes, mine, parallel="fsdp")

        ends.append(together(2, work))
    ends.append(together(2, lambda p: trained(home / "killed", p, parallel="fsdp")))
    return ends


def full(home: Path) -> list[list[int]]:
    """Train; then the last process has no room for more than a kilobyte in a file."""

    def work(processes: Processes) -> None:
        if processes.rank:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        trained(home / "run", processes, parallel="fsdp", steps=6)

    return [
        together(2, lambda p: trained(home / "run", p, parallel="fsdp", steps=4)),
        together(2, work),
    ]


def left(_: Path) -> list[list[int]]:
    """Kill a process that the other one waits for."""

    def work(processes: Processes) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        processes.sum(1)
        if processes.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        processes.sum(1)

    return [together(2, work)]


def slow(home: Path) -> list[list[int]]:
    """Save once; files are written after two more updates."""

    def work(processes: Processes) -> None:
        updated, write = threading.Event(), checkpoint.write_tensors

        def written(*given: Any) -> str:
            assert updated.wait(120)
            return write(*given)

        checkpoint.write_tensors = written
        run = Trainer(*parts(home / "run", parallel="fsdp"), processes, home / "run", None)
        for step in range(4):
            run._update()
            run.progress.steps += 1
            if step == 1:
                run.save()
        updated.set()
        run.commit()

    return [together(2, work)]


def reshard(home: Path) -> list[list[int]]:
    """Train with two processes; then one reads the checkpoint and writes it, and then four do."""
    return [
        together(2, lambda p: trained(home / "two", p, steps=4, shard=2)),
        together(1, lambda p: copied(home / "two", home / "one", p)),
        together(4, lambda p: copied(home / "one", home / "four", p, shard=2)),
    ]


def copied(source: Path, target: Path, processes: Processes, **settings: Any) -> None:
    """Read the newest checkpoint of a run, and write it as one of another."""
    run = Trainer(*parts(source, steps=4, **settings), processes, source, None)
    run.resume()
    run.folder = target
    run.save()
    run.commit()


if __name__ == "__main__":
    home = Path(sys.argv[2])
    (home / "text.txt").write_bytes(bytes(97 + n * n % 23 for n in range(2000)))
    modes = {mode.__name__: mode for mode in (mesh, kill, full, left, slow, reshard)}
    sys.stdout.write(json.dumps(modes[sys.argv[1]](home)))
