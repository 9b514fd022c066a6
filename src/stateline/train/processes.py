"""Processes that train one model together, started by ``torchrun``."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from stateline.devices import resolve_device
from stateline.errors import InputError
from stateline.generate.random import widest
from stateline.layers.state import cat_states
from stateline.models.factory import AnyModel
from stateline.train.environment import environment
from stateline.train.segment import Segment

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """This process among the processes that train one model together.

    Every process takes its share of the rows of each batch, so the result depends on the number of
    processes only by rounding.

    Attributes:
        rank: Number of this process, from 0.
        count: Number of processes.
        device: Device of this process.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """This process's rows of a batch.

        Raises:
            InputError: If the rows cannot be divided evenly.
        """
        share, left = divmod(batch_size, self.count)
        if left:
            raise InputError(
                f"batch_size must be a multiple of the {self.count} processes, got {batch_size}"
            )
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, value: int | float) -> float:
        """Sum over all processes."""
        if self.count == 1:
            return float(value)
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def sum_losses(self, losses: Sequence[Tensor]) -> Tensor:
        """Sum of scalars over all processes, on the device."""
        total = torch.zeros((), dtype=widest(self.device), device=self.device)
        for loss in losses:
            total = total + loss.to(total)
        if self.count > 1:
            dist.all_reduce(total)
        return total

    def join_rows(self, state: Any) -> Any:
        """The state of the whole batch on the main process; ``None`` on the others."""
        if self.count == 1 or state is None:
            return state
        states: list[Any] | None = [None] * self.count if self.main else None
        dist.gather_object(pytree.tree_map(torch.Tensor.cpu, state), states)
        return cat_states(states) if states else None

    def on_main(self, work: Callable[[], object]) -> None:
        """Run ``work`` on the main process while the others wait; all end if it fails.

        Raises:
            InputError: From ``work``, on the main process; the others exit silently.
        """
        error = None
        try:
            if self.main:
                work()
        except InputError as caught:
            error = caught
        failed = self.sum(error is not None)
        if error is not None:
            raise error
        if failed:
            raise SystemExit(2)

    def environment(self) -> dict[str, str | int]:
        """Versions and machine, for the record of a run."""
        return {**environment(), "device": self.device.type, "processes": self.count}

    def wrap(self, segment: Segment, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
        """The segment for all processes; with ``fsdp`` its model is sharded in place."""
        if self.count == 1:
            return segment
        if parallel == "ddp":
            return DistributedDataParallel(segment)
        _shard(segment.model)
        return segment

    def local(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Exchange gradients only in the last backward pass of an update."""
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        if self.count > 1 and isinstance(module, Segment):
            assert isinstance(module.model, FSDPModule)
            module.model.set_requires_gradient_sync(last)
        return nullcontext()


def local_part(parameter: Tensor) -> Tensor:
    """This process's part of a parameter, which may be sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _shard(model: AnyModel) -> None:
    """Shard every block with FSDP2: its parameters are whole only while they are used."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for module in (*model.stack.links, model):  # no output is changed in place
        fully_shard(module)
        for verb in ("init_state", "forward_chunk", "step", "step_"):
            register_fsdp_forward_method(module, verb)


@contextmanager
def join_processes(device: str = "auto") -> Iterator[Processes]:
    """Give the processes that ``torchrun`` started, or this one alone.

    Args:
        device: Name of a device, see :func:`stateline.devices.resolve_device`. If it names no
            single GPU, each process takes the GPU of its own number.

    Raises:
        InputError: If there is no such device, or no GPU for each process.
    """
    place = resolve_device(device)
    on_gpu = place.type == "cuda"
    if on_gpu and place.index is None:
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise InputError(
                f"there must be a GPU for each process, and there are {torch.cuda.device_count()}: "
                "start fewer, or give --device cpu"
            )
        place = torch.device("cuda", local)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Processes(device=place)
        return
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        if on_gpu:
            torch.cuda.set_device(place)
        yield Processes(dist.get_rank(), dist.get_world_size(), place)
        dist.barrier()  # a process that sends to one that has ended may abort
    finally:
        dist.destroy_process_group()
