"""Reading grey-scale PNG images with 8 bits per pixel."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
LARGEST = 1 << 24
"""Pixels that an image may have."""


def read_grey(path: Path) -> UInt8[np.ndarray, "rows columns"]:
    """The pixels of an image.

    Raises:
        ValueError: If it is not such an image, or damaged.
    """
    chunks = _chunks(path.read_bytes())
    kind, header = next(chunks)
    if kind != b"IHDR" or len(header) != 13:
        raise ValueError("it is not a PNG image")
    width, height, *form = struct.unpack(">IIBBBBB", header)
    if form != [8, 0, 0, 0, 0] or not 0 < width * height <= LARGEST:
        raise ValueError(
            "it must be a PNG image in grey with 8 bits per pixel, not interlaced, of at most "
            f"{LARGEST:,} pixels"
        )
    data = b"".join(part for name, part in chunks if name == b"IDAT")
    unpacked = zlib.decompressobj().decompress(data, height * (width + 1) + 1)
    if len(unpacked) != height * (width + 1):
        raise ValueError("its pixels are damaged")
    lines = np.frombuffer(unpacked, np.uint8).reshape(height, width + 1)
    return _unfiltered(lines)


def _chunks(contents: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and contents of each chunk."""
    if contents[:8] != _SIGNATURE:
        raise ValueError("it is not a PNG image")
    at = 8
    while at + 12 <= len(contents):
        size = int.from_bytes(contents[at : at + 4], "big")
        yield contents[at + 4 : at + 8], contents[at + 8 : at + 8 + size]
        at += 12 + size


def _unfiltered(lines: UInt8[np.ndarray, "rows filtered"]) -> UInt8[np.ndarray, "rows columns"]:
    """Undo the filter that the first byte of each line names (PNG specification, section 9)."""
    pixels = np.zeros((len(lines), lines.shape[1] - 1), np.uint8)
    above = np.zeros_like(pixels[0])
    for row, line in enumerate(lines):
        if line[0] > 4:
            raise ValueError(f"it has a line with the filter {line[0]}, and there are 0 to 4")
        above = pixels[row] = _line(int(line[0]), line[1:], above)
    return pixels


def _line(kind: int, filtered: np.ndarray, above: np.ndarray) -> np.ndarray:
    if kind == 0:
        return filtered
    if kind == 1:
        return np.cumsum(filtered, dtype=np.uint8)
    if kind == 2:
        return filtered + above
    line, left, corner = np.zeros_like(filtered), 0, 0
    for place, (rest, up) in enumerate(zip(filtered.tolist(), above.tolist(), strict=True)):
        guess = (left + up) // 2 if kind == 3 else _paeth(left, up, corner)
        left, corner = (rest + guess) % 256, up
        line[place] = left
    return line


def _paeth(left: int, up: int, corner: int) -> int:
    """The neighbour closest to left + up - corner."""
    estimate = left + up - corner
    return min((left, up, corner), key=lambda value: abs(estimate - value))
