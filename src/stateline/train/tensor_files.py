"""Safetensors files written and read piece by piece: neither takes memory for a whole tensor."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

PIECE = 1 << 24
"""Bytes that are read or written at a time."""

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file; its data begin at byte ``start``."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int

    def pieces(self, first: int = 0, count: int | None = None) -> Iterator[Tensor]:
        """``count`` elements (by default all) that begin at ``first``, as vectors in one buffer.

        Raises:
            ValueError: If the file ends too early.
        """
        left = self.shape.numel() - first if count is None else count
        size = self.dtype.itemsize
        memory = torch.empty(min(PIECE, left * size), dtype=torch.uint8)
        with self.file.open("rb") as file:
            file.seek(self.start + first * size)
            while left:
                part = memory[: min(PIECE // size, left) * size]
                if file.readinto(part.numpy()) != len(part):  # type: ignore[arg-type]
                    raise ValueError(f"{self.file.name} ends too early")
                yield part.view(self.dtype)
                left -= len(part) // size

    def fill(self, target: Tensor, first: int = 0) -> None:
        """Fill a tensor of the same dtype with the elements that begin at ``first``."""
        whole = target if target.is_contiguous() else torch.empty_like(target).contiguous()
        flat, place = whole.detach().view(-1), 0
        for piece in self.pieces(first, flat.numel()):
            flat[place : place + len(piece)].copy_(piece)
            place += len(piece)
        if whole is not target:
            target.copy_(whole)

    def read(self) -> Tensor:
        """The tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(tensor)
        return tensor


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name.

    Raises:
        SafetensorError: If its header does not fit its size.
        KeyError: If a dtype is unknown.
    """
    with safe_open(path, framework="pt"):
        pass  # it checks the header
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: Entry(
            path,
            _DTYPES[found["dtype"]],
            torch.Size(found["shape"]),
            8 + length + found["data_offsets"][0],
        )
        for name, found in header.items()
    }


def ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors in the order of a file: aligned, and then by name."""
    return sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], fetch: Callable[[str], Tensor] | None = None
) -> str:
    """Write tensors into a file, and flush it to disk.

    Args:
        path: The file.
        tensors: By name; only their shapes and dtypes count if there is ``fetch``.
        fetch: Called with each name, in the order of the file; returns the tensor on the CPU.

    Returns:
        The file's SHA-256 hash.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for data in _contents(ordered(tensors), fetch or tensors.__getitem__):
            digest.update(data)
            while data:  # a write may be incomplete
                data = data[file.write(data) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def _contents(
    tensors: list[tuple[str, Tensor]], fetch: Callable[[str], Tensor]
) -> Iterator[memoryview]:
    """A file's header and data."""
    header, at = {}, 0
    for name, tensor in tensors:
        begin, at = at, at + tensor.nbytes
        code = _CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, at]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data are aligned
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name, _ in tensors:
        flat = fetch(name).detach().contiguous().view(-1).view(torch.uint8)
        for piece in flat.split(PIECE):
            yield piece.numpy().data
