"""Parts of tensors: each process copies its parts, and the process that writes joins them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

ALIGNMENT = 64
"""Alignment of tensors in a block of memory, in bytes."""


class HeldRows(NamedTuple):
    """The part of a tensor that a process holds; one process, its owner, needs the whole tensor.

    Attributes:
        rows: Its rows; the whole tensor if ``holders`` is empty; empty if not needed.
        like: The whole tensor, without memory.
        holders: The processes that hold the rows, in order; empty if each process holds all.
    """

    rows: Tensor
    like: Tensor
    holders: list[int]

    @classmethod
    def of(cls, tensor: Tensor, owner: int, rank: int) -> "HeldRows":
        """The part of process ``rank``; its rows are the tensor's own memory."""
        like, holders = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), list[int]()
        if isinstance(tensor, DTensor):
            copies = tensor.device_mesh.mesh.view(-1, tensor.device_mesh.size(-1)).tolist()
            holders = next(ranks for ranks in copies if owner in ranks)
            tensor = tensor.to_local()
        needed = rank in (holders or [owner])
        return cls(tensor.detach() if needed else tensor.new_empty(0), like, holders)

    def send(self, owner: int, group: Any = None) -> Callable[[], object]:
        """Begin to send the rows to the owner; the returned function waits until they are sent.

        The owner must ask for tensors in the order in which they are sent.
        """
        if not self.holders or not self.rows.numel():
            return lambda: None
        rows = self.rows.cpu().contiguous()
        sending = dist.isend(rows, owner, group)
        assert sending is not None
        return lambda: (sending.wait(), rows)  # rows must live until then

    def whole(self, rank: int, memory: Tensor, group: Any = None) -> Tensor:
        """The whole tensor, for its owner, which receives the rows of the other holders.

        Args:
            rank: Number of this process.
            memory: At least as many bytes as the tensor has.
            group: Connections between the holders.
        """
        if not self.holders:
            return self.rows.cpu()
        whole = memory[: self.like.nbytes].view(self.like.dtype).view(self.like.shape)
        receiving = []
        for rows, holder in zip(whole.chunk(len(self.holders)), self.holders, strict=False):
            if holder == rank:
                rows.copy_(self.rows)
            else:
                receiving.append(dist.irecv(rows, holder, group))
        for work in receiving:
            assert work is not None
            work.wait()
        return whole


def memory_for(parts: Sequence[HeldRows]) -> Tensor:
    """Memory that is large enough to join any one of these tensors."""
    most = max((part.like.nbytes for part in parts if part.holders), default=0)
    return torch.empty(most, dtype=torch.uint8)


class Copies:
    """Copies of parts, in memory that is kept for the next ones.

    Copying takes an eighth of the time that the system needs to clear new memory, page by page.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, parts: Sequence[HeldRows]) -> list[HeldRows]:
        """The parts with copies of their rows, which overwrite the copies of the last call."""
        sizes = [-(-part.rows.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        if (needed := sum(sizes)) > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            room = needed + needed // 8  # for states that grow; it takes no memory until it is used
            self._memory = torch.empty(room, dtype=torch.uint8)
        copies = []
        for part, place in zip(parts, self._memory[:needed].split(sizes), strict=True):
            rows = place[: part.rows.nbytes].view(part.rows.dtype).view(part.rows.shape)
            copies.append(part._replace(rows=rows.copy_(part.rows)))
        return copies
