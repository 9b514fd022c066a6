"""Training batches cut into micro-batches, built ahead of time for an accelerator."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stateline.tasks.base import ConsecutiveBatch, Inputs, PackedBatch, Task, check_batch
from stateline.train.config import TrainConfig
from stateline.train.processes import Processes

AHEAD = 2
"""Updates whose batches are built ahead of time."""


class MicroBatch(NamedTuple):
    """Rows of a batch, or a segment of them: what one forward and backward pass sees.

    Attributes:
        tokens: Inputs.
        targets: Targets.
        fresh: Rows that begin with an empty state, on the CPU; ``None`` if no state is needed.
        scored: Number of targets that are not ignored.
        starts: True where a document of packed rows begins, on the CPU.
    """

    tokens: Inputs
    targets: Tensor
    fresh: Bool[Tensor, " batch"] | None
    scored: int
    starts: Bool[Tensor, "batch length"] | None = None


class Batches:
    """The micro-batches of every update, on the device of the process.

    Batches are functions of an index, so they can be built before they are needed. On an
    accelerator a thread builds the next batches while the device computes, and on CUDA it pins
    them, so that the copy to the device does not wait. On the CPU they are built when they are
    needed: a thread would compete with the model for the same cores.

    Only one thread at a time may use a task, since tasks keep the last epoch: call :meth:`settle`
    before using the task elsewhere.

    Args:
        task: Gives the batches.
        config: Says how they are cut.
        processes: This process's share of the rows, and its device.
    """

    def __init__(self, task: Task, config: TrainConfig, processes: Processes) -> None:
        self.task, self.config, self.processes = task, config, processes
        processes.rows(task.batch_size)  # refused now, not at the first update
        self._ahead = AHEAD if processes.device.type != "cpu" else 0
        self._pool = ThreadPoolExecutor(1, "batches") if self._ahead else None
        self._waiting: deque[tuple[int, Future[list[MicroBatch]]]] = deque()

    def update(self, step: int) -> list[MicroBatch]:
        """The micro-batches of update number ``step``, from 0.

        Raises:
            Exception: Any exception of the task while it built them.
        """
        if self._pool is None:
            return self._build(step)
        if self._waiting and self._waiting[0][0] != step:
            self.settle()
            self._waiting.clear()
        for later in range(step + len(self._waiting), min(step + self._ahead, self.config.steps)):
            self._waiting.append((later, self._pool.submit(self._build, later)))
        built = self._waiting.popleft()[1].result()
        return [self._moved(micro) for micro in built]

    def settle(self) -> None:
        """Wait until no thread uses the task."""
        wait([future for _, future in self._waiting])

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _build(self, step: int) -> list[MicroBatch]:
        first = step * self.config.accumulate
        built = [micro for i in range(self.config.accumulate) for micro in self._cut(first + i)]
        return [self._pinned(m) for m in built] if self.processes.device.type == "cuda" else built

    def _cut(self, index: int) -> Iterator[MicroBatch]:
        """This process's rows of a batch, cut along the sequence."""
        config, task = self.config, self.task
        batch = task.consecutive_batch(index) if config.carry_state else task.train_batch(index)
        tokens, targets, starts = *batch[:2], None
        check_batch(task, tokens, targets)
        rows = self.processes.rows(len(tokens))
        fresh = torch.ones(len(tokens), dtype=torch.bool)
        if isinstance(batch, PackedBatch):
            starts = batch.starts[rows]
            fresh = batch.starts[:, 0] if config.carry_state else fresh
        elif isinstance(batch, ConsecutiveBatch):
            fresh = batch.fresh
        stateless = config.segment_len is None and not config.carry_state
        length = tokens.shape[1] if config.segment_len is None else config.segment_len
        for at in range(0, tokens.shape[1], length):
            here, wanted = (part[rows, at : at + length] for part in (tokens, targets))
            anew = None if stateless else fresh[rows] & (at == 0)
            begun = None if starts is None else starts[:, at : at + length]
            yield MicroBatch(here, wanted, anew, int(task.asked(wanted).sum()), begun)

    def _pinned(self, micro: MicroBatch) -> MicroBatch:
        return micro._replace(tokens=micro.tokens.pin_memory(), targets=micro.targets.pin_memory())

    def _moved(self, micro: MicroBatch) -> MicroBatch:
        device = self.processes.device
        tokens, targets = (
            part.to(device, non_blocking=True) for part in (micro.tokens, micro.targets)
        )
        return micro._replace(tokens=tokens, targets=targets)


def positions_after(positions: Int[Tensor, " batch"], micro: MicroBatch) -> Int[Tensor, " batch"]:
    """Tokens that each row's state has seen after a micro-batch, on the CPU."""
    assert micro.fresh is not None
    positions = torch.where(micro.fresh, 0, positions) + micro.tokens.shape[1]
    if micro.starts is None:
        return positions
    since = micro.starts.flip(1).long().argmax(1) + 1  # the last start of the row
    return torch.where(micro.starts.any(1), since, positions)
