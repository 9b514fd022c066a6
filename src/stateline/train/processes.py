"""Processes that train one model together, started by ``torchrun``."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stateline.devices import resolve_device
from stateline.errors import InputError
from stateline.evaluate.division import Division, dividing
from stateline.generate.random import widest
from stateline.models.factory import AnyModel, float32_parameters
from stateline.train.config import TrainConfig
from stateline.train.environment import environment
from stateline.train.segment import Segment

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """This process among the processes that train one model together.

    Every process takes its share of the rows of each batch, so the result depends on the number of
    processes only by rounding. Two things differ between processes: the masks of dropout, and the
    loss that balances experts, whose mean over the processes is added.

    Attributes:
        rank: Number of this process, from 0.
        count: Number of processes.
        device: Device of this process.
        background: Connections for transfers that go on while the processes train.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = CPU
    background: Any = None

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
                f"the rows of every batch must be a multiple of the {self.count} processes, got "
                f"{batch_size}: change batch_size or the number of processes"
            )
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, value: int | float) -> float:
        """Sum over all processes."""
        return self.sums(value)[0]

    def sums(self, *values: int | float) -> list[float]:
        """Sums over all processes."""
        if self.count == 1:
            return [float(value) for value in values]
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def sum_tensors(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum of tensors of one shape over all processes, on the device."""
        total = torch.zeros((), dtype=widest(self.device), device=self.device)
        for tensor in tensors:
            total = total + tensor.to(total)
        if self.count > 1:
            dist.all_reduce(total)
        return total

    def share(self, value: Any) -> list[Any]:
        """The small values of all processes, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def scoring(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside the ``with`` block, divide the rows of each scored batch among the processes."""
        if self.count == 1:
            return nullcontext()
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        return dividing(Division(self.rank, self.count, self.share, sharded))

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
        return {**environment(self.device), "device": self.device.type, "processes": self.count}

    def shards(self, config: TrainConfig) -> int:
        """The number of processes that hold one copy of the model together.

        Raises:
            InputError: If it does not divide the number of processes.
        """
        shards = config.shard or (1 if config.parallel == "ddp" else self.count)
        if self.count == 1:
            return 1
        if self.count % shards:
            raise InputError(
                f"train.shard must divide the number of processes, which is {self.count}, got "
                f"{shards}"
            )
        return shards

    def wrap(self, segment: Segment, shards: int, partial: bool = False) -> nn.Module:
        """The segment for all processes; its model is sharded in place among ``shards`` of them.

        Args:
            segment: The segment.
            shards: The number of processes that hold one copy of the model together.
            partial: Whether some weights take no part in the loss.
        """
        if self.count == 1:
            return segment
        if shards == 1:
            return DistributedDataParallel(segment, find_unused_parameters=partial)
        shard(segment.model, self._mesh(shards), segment.dtype)
        return segment

    def _mesh(self, shards: int) -> DeviceMesh:
        """Processes by copy of the model and by shard; one axis if there is one copy."""
        copies, kind = self.count // shards, self.device.type
        if copies == 1:
            return init_device_mesh(kind, (shards,))
        return init_device_mesh(kind, (copies, shards), mesh_dim_names=("copy", "shard"))

    def local(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Exchange gradients only in the last backward pass of an update."""
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        if self.count > 1 and isinstance(module, Segment):
            assert isinstance(module.model, FSDPModule)
            module.model.set_requires_gradient_sync(last)
        return nullcontext()


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This process's part of a tensor, and the index of its first element in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh, local = tensor.device_mesh, tensor.to_local()
    rows = -(-len(tensor) // mesh.size(-1))  # as torch.chunk divides them
    before = min(len(tensor), rows * mesh.get_local_rank(mesh.ndim - 1))
    return local, before * tensor.shape[1:].numel()


def shard(model: AnyModel, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Shard every block with FSDP2: its parameters are whole only while they are used.

    Weights that autocast multiplies in ``dtype`` are gathered in it. FSDP's own policy for mixed
    precision would round all parameters of a block and all activations between blocks, and with
    them transitions of state spaces, norms and states. Here results equal the results of autocast.

    Args:
        model: It is changed in place.
        mesh: The processes; the last axis holds the shards.
        dtype: Precision of matrix products in training.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for module in (*model.stack.links, model):  # nothing changes outputs in place
        fully_shard(module, mesh=mesh)
        for verb in ("init_state", "forward_chunk", "step", "step_"):
            _gather_for(module, verb)
    exact = float32_parameters(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" not in exact:
            even = len(module.weight) % mesh.size(-1) == 0  # FSDP pads the others
            if dtype != torch.float32 and even:
                _gather_in(dtype, module.weight)


def _gather_for(module: Any, verb: str) -> None:
    """Gather parameters for a method, unless its own module calls it and has gathered them.

    FSDP would free them after the inner call, and gather them again at the next one. The number of
    inner calls depends on the rows of a process, so other processes would wait for ever.
    """
    own = getattr(module, verb)
    register_fsdp_forward_method(module, verb)
    gathering = getattr(module, verb)

    def method(self: Any, *inputs: Any, **options: Any) -> Any:
        inside = self._get_fsdp_state()._training_state is TrainingState.FORWARD
        return (own if inside else gathering)(*inputs, **options)

    setattr(module, verb, MethodType(method, module))


def _gather_in(dtype: torch.dtype, weight: Tensor) -> None:
    """Gather a sharded weight in a lower precision, by the two functions that FSDP looks for."""
    assert isinstance(weight, DTensor)
    local = getattr(weight, weight.__tensor_flatten__()[0][0])

    def before(_mesh: Any, _size: Any, _stride: Any, _module: Any, _policy: Any) -> Any:
        return (local.to(dtype),), None

    def after(found: tuple[Tensor], _: Any, wide: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            return out.data.copy_(found[0])
        whole = found[0].to(wide)
        return whole, (whole,)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after


@contextmanager
def join_processes(device: str = "auto") -> Iterator[Processes]:
    """Give the processes that ``torchrun`` started, or this one alone.

    Args:
        device: Name of a device, see :func:`stateline.devices.resolve_device`. If it names no
            single GPU, each process takes the GPU of its own number.

    Raises:
        InputError: If there is no such device, no GPU for each process, or no way to find the
            other processes; or, inside the ``with`` block, if another process ends.
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
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Processes(device=place)
        return
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # by which processes find each other
    if missing := [name for name in names if name not in os.environ]:
        raise InputError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that processes train together, but "
            f"{', '.join(missing)} is not set: start them with torchrun, or unset WORLD_SIZE"
        )
    store, rank, count = next(rendezvous("env://"))
    # torchrun keeps its store when it starts the processes again, with the old addresses in it
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    try:
        if on_gpu:
            torch.cuda.set_device(place)
        no_limit = timedelta(days=365)  # a transfer may have to wait for a disk
        background = dist.new_group(backend="gloo", timeout=no_limit)
        yield Processes(dist.get_rank(), dist.get_world_size(), place, background)
        dist.barrier()  # a process that sends to one that has ended may abort
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        raise InputError(
            f"another of the {dist.get_world_size()} processes has ended or no longer answers: "
            "look for its message; start all again with --resume to go on from the newest "
            "checkpoint"
        ) from error
    finally:
        dist.destroy_process_group()
