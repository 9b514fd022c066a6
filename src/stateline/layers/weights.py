"""Whether the weights of a model are those that a value was computed from."""

import math
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

MOST_READ = 1 << 20
"""Numbers of one tensor that are compared; of a larger tensor, rows at equal distances."""


class Weights:
    """The parameters and buffers that a module has now, to find out later whether it still has.

    :meth:`replaced` sees within microseconds whether a tensor, its memory, a module or a hook was
    replaced, and whether PyTorch has counted a change in place. :meth:`changed` also compares
    sums of the bits of every row, and so sees changes that nobody counts: through ``.data`` or
    NumPy, by fused optimizers and those of other libraries. It takes less time than a token of the
    model. It can miss a change of a few rows in a tensor of more than :data:`MOST_READ` numbers,
    and an exchange of numbers inside a row.

    Args:
        module: The module. Its present tensors stay alive as long as this object.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        tables = (t for m in modules for t in (m._modules, m._parameters, m._buffers) if t)
        self._views = [table.values() for table in tables]
        self._parts: list[object] = [*chain.from_iterable(self._views)]
        tensors = [part for part in self._parts if isinstance(part, Tensor)]
        self._held = [x.detach() for x in tensors]  # their memory gets no other use
        self._plain = [x for x in tensors if _has_memory(x)]
        self._counted = [x for x in tensors if not x.is_inference()]
        self._marks, self._sums = self._counts(), self._row_sums()

    def replaced(self) -> bool:
        """Whether anything was replaced, or changed in a way that PyTorch counts."""
        now = [*chain.from_iterable(self._views)]
        if len(now) != len(self._parts) or not all(map(is_, now, self._parts)):
            return True
        return self._counts() != self._marks

    def changed(self) -> bool:
        """Whether anything was replaced or any number that is compared has changed."""
        return self.replaced() or not all(map(torch.equal, self._row_sums(), self._sums))

    def _counts(self) -> tuple[object, ...]:
        versions = [*map(attrgetter("_version"), self._counted)]
        return RemovableHandle.next_id, versions, [*map(Tensor.data_ptr, self._plain)]

    def _row_sums(self) -> list[Tensor]:
        return [_row_sums(x) for x in self._plain if not x.is_meta]


def _has_memory(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter)


@torch.no_grad()
def _row_sums(x: Tensor) -> Tensor:
    """Sums of the bits of the rows, as whole numbers, so that no rounding hides a change."""
    rows = x.detach().reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
    rows = rows[:: -(-x.numel() // MOST_READ) or 1]
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    size = math.gcd(rows.shape[-1], rows.stride(0), rows.storage_offset()) * rows.element_size()
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return rows.view(next(kind for kind in kinds if size % kind.itemsize == 0)).sum(dim=-1)
