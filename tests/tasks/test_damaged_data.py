"""Damaged data, and small files that would fill the memory, are refused in one line."""

import gzip
import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from stateline.errors import InputError
from stateline.tasks import make_task
from tests.tasks.small_data import sequential_image, spoken_digits


def refused(spec: str) -> str:
    with pytest.raises(InputError) as error:
        make_task(spec)
    return str(error.value)


def npz(path: Path, **header: int) -> Path:
    """A compressed file, whose directory and whose entries have other values at some places."""
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(20, 50)), y=np.arange(20))
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\1\2")
    while at >= 0:
        local = struct.unpack_from("<I", data, at + 42)[0]
        for place, name in (("flags", 6), ("method", 8)):
            if place in header:
                struct.pack_into("<H", data, local + name, header[place])
                struct.pack_into("<H", data, at + name + 2, header[place])
        if "size" in header:
            struct.pack_into("<I", data, at + 24, header["size"])
        at = data.find(b"PK\1\2", at + 4)
    path.write_bytes(data)
    return path


def test_arrays_that_cannot_be_unpacked_are_refused(tmp_path: Path) -> None:
    encrypted, unknown = npz(tmp_path / "a.npz", flags=1), npz(tmp_path / "b.npz", method=97)
    assert "a.npz: File 'x.npy' is encrypted" in refused(f"signals(path={encrypted})")
    assert "b.npz: That compression method is not supported" in refused(f"signals(path={unknown})")
    cut = npz(tmp_path / "c.npz")
    data = bytearray(cut.read_bytes())
    data[100:140] = bytes(40)
    cut.write_bytes(data)
    assert "c.npz: Error -3 while decompressing" in refused(f"signals(path={cut})")


@pytest.mark.parametrize("shape", [(1 << 62, 1 << 62), (1 << 40, 1 << 20), (10**30,)])
def test_an_array_of_an_absurd_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "a.npy"
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(64))
    assert "the task signals cannot read" in refused(f"signals(path={path})")
    packed = tmp_path / "a.npz"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", path.read_bytes())
    assert "the task signals cannot read" in refused(f"signals(path={packed})")


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = npz(tmp_path / "a.npz", size=(1 << 32) - 2)
    monkeypatch.setattr("stateline.tasks.signals.tables.MAX_BYTES", 1 << 32)
    message = refused(f"signals(path={path})")
    assert "unpacked it would take 8,589,934,588 bytes, and may take 4,294,967,296" in message


@pytest.mark.parametrize("value", [1.5, "x" * 10_000])
def test_a_table_of_one_repeated_value_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = 1_000_000 if value == 1.5 else 10_000
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))
    parquet.write_table(pa.table({"a": column, "label": column}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    monkeypatch.setattr("stateline.tasks.signals.tables.MAX_BYTES", 1 << 25)
    message = refused(f"signals(path={tmp_path / 'a.parquet'})")
    assert "unpacked it would take" in message
    assert "a quarter of this machine's memory" in message


def test_a_recording_with_an_absurd_header_is_refused(tmp_path: Path) -> None:
    file = spoken_digits(tmp_path) / "recordings" / "1_ann_4.wav"
    data = bytearray(file.read_bytes())
    struct.pack_into("<I", data, 16, 4)  # the size of its format
    file.write_bytes(data)
    assert "1_ann_4.wav" in refused(f"spoken_digits(path={tmp_path}, batch_size=4)")


def idx(header: list[int], values: bytes) -> bytes:
    return gzip.compress(np.array(header, ">u4").tobytes() + values, mtime=0)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("labels-idx1", idx([2049, 40], bytes([10] * 40)), "has the class 10, and there are 0 to"),
        ("labels-idx1", idx([2049, 39], bytes(39)), "are not of one number"),
        (
            "labels-idx1",
            b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\xff" * 20,
            "Error -3 while decompress",
        ),
        ("labels-idx1", b"", "not have the number of bytes"),
        ("images-idx3", idx([2051, 40, 3, 2], bytes(239)), "not have the number of bytes"),
        ("images-idx3", idx([2051, *[(1 << 32) - 1] * 3], b""), "unpacked it would take"),
        ("images-idx3", idx([2051, 40], b""), "not have the number of bytes"),
    ],
)
def test_damaged_images_of_digits_are_refused(
    tmp_path: Path, kind: str, data: bytes, message: str
) -> None:
    folder = sequential_image(tmp_path, "t10k", 40)
    (folder / f"t10k-{kind}-ubyte.gz").write_bytes(data)
    assert message in refused(f"sequential_image(path={folder}, batch_size=4)")


def test_reading_a_compressed_file_stops_at_the_size_in_its_header(tmp_path: Path) -> None:
    folder, packed = sequential_image(tmp_path, "t10k", 40), io.BytesIO()
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(np.array([2051, 40, 3, 2], ">u4").tobytes())
        for _ in range(64):
            file.write(bytes(1 << 20))
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(packed.getvalue())
    tracemalloc.start()
    message = refused(f"sequential_image(path={folder}, batch_size=4)")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "not have the number of bytes" in message
    assert peak < 1 << 23
