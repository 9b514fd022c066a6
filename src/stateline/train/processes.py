"""Several processes that train one model, started by ``torchrun``."""

import os
import warnings
from collections.abc import Callable, Iterator
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

from stateline.errors import InputError
from stateline.layers.state import cat_states
from stateline.models.make import AnyModel
from stateline.train.environment import environment
from stateline.train.segment import Segment

Device = Literal["auto", "cpu", "cuda"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """Those that train one model together, and which of them this is.

    Every process takes its share of the rows of each batch, so that what is learned does not depend
    on their number, but for rounding.

    Attributes:
        rank: Number of this process, from 0.
        count: How many there are.
        device: Where this one computes.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """This process's rows of a batch.

        Raises:
            InputError: If the rows cannot be shared out evenly.
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

    def join_rows(self, state: Any) -> Any:
        """The state of the whole batch, on the main process; elsewhere nothing."""
        if self.count == 1 or state is None:
            return state
        states: list[Any] | None = [None] * self.count if self.main else None
        dist.gather_object(pytree.tree_map(torch.Tensor.cpu, state), states)
        return cat_states(states) if states else None

    def on_main(self, work: Callable[[], object]) -> None:
        """Let the main process do what may fail, while the others wait; all end if it fails.

        Raises:
            InputError: As ``work`` does, in the main process; the others leave without a word.
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
        """What a run records of where it ran."""
        return {**environment(), "device": self.device.type, "processes": self.count}

    def wrap(self, segment: Segment, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
        """The segment as these processes share it; with ``fsdp`` its model is sharded in place."""
        if self.count == 1:
            return segment
        if parallel == "ddp":
            return DistributedDataParallel(segment)
        _shard(segment.model)
        return segment

    def local(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Gradients stay with their process, except in the last backward pass of an update."""
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        if self.count > 1 and isinstance(module, Segment):
            assert isinstance(module.model, FSDPModule)
            module.model.set_requires_gradient_sync(last)
        return nullcontext()


def local_part(parameter: Tensor) -> Tensor:
    """What this process has of a parameter that may be sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _shard(model: AnyModel) -> None:
    """FSDP2: a share of every block's parameters, which are whole only while they are used."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for module in (*model.stack.links, model):  # no output is changed in place
        fully_shard(module)
        for verb in ("init_state", "forward_chunk", "step", "step_"):
            register_fsdp_forward_method(module, verb)


@contextmanager
def join_processes(device: Device = "auto") -> Iterator[Processes]:
    """Give the processes that ``torchrun`` started, or this one alone.

    Raises:
        InputError: If a GPU is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device must be cpu or auto here: PyTorch finds no CUDA device")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if on_gpu and local >= torch.cuda.device_count():
        raise InputError(
            f"there must be a GPU for each process, and there are {torch.cuda.device_count()}: "
            "start fewer, or give --device cpu"
        )
    place = torch.device("cuda", local) if on_gpu else CPU
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Processes(device=place)
        return
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        if on_gpu:
            torch.cuda.set_device(place)
        yield Processes(dist.get_rank(), dist.get_world_size(), place)
        dist.barrier()  # a process that still talks to one that has left may abort
    finally:
        dist.destroy_process_group()
