"""Files of tensors in pieces: what safetensors reads and writes itself."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stateline.files import sha256
from stateline.train import tensor_files
from stateline.train.tensor_files import Entry, entries, write_tensors

pytestmark = pytest.mark.cpu  # what is tested are files


@pytest.fixture(params=[1 << 24, 48])
def tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Of all kinds, in pieces that are larger and smaller than they."""
    monkeypatch.setattr(tensor_files, "PIECE", request.param)
    torch.manual_seed(0)
    kinds = [*tensor_files._CODES, torch.float32]
    found = {f"{n}": torch.randn(5, 7).mul(50).to(dtype) for n, dtype in enumerate(kinds)}
    found |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    return found | {"crossed": torch.randn(4, 6).mT, "every other": torch.randn(10)[::2]}


def test_safetensors_reads_what_is_written(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    file = tmp_path / "x.safetensors"
    assert write_tensors(file, tensors) == sha256(file)
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


def test_what_safetensors_writes_is_read(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    file = tmp_path / "x.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    for name, entry in entries(file).items():
        assert entry.read().equal(tensors[name])
        assert entry.dtype == tensors[name].dtype


def test_a_part_of_a_tensor_is_read_into_any_memory(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    file = tmp_path / "x.safetensors"
    write_tensors(file, {"x": torch.arange(60.0).view(10, 6), **tensors})
    target = torch.empty(6, 3).mT
    entries(file)["x"].fill(target, first=12)
    assert target.equal(torch.arange(12.0, 30.0).view(3, 6))


def test_a_file_that_was_cut_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    file = tmp_path / "x.safetensors"
    write_tensors(file, tensors)
    found = entries(file)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(SafetensorError):
        entries(file)
    with pytest.raises(ValueError, match="ends too early"):
        list(map(Entry.read, found.values()))


def test_tensors_are_fetched_in_the_order_of_the_file(tmp_path: Path) -> None:
    order: list[str] = []

    def fetch(name: str) -> Tensor:
        order.append(name)
        return torch.ones(likes[name].shape)

    likes = {"b": torch.empty(2, device="meta"), "a": torch.empty(3, device="meta")}
    write_tensors(tmp_path / "x", likes, fetch)
    assert order == ["a", "b"]
    assert load_file(tmp_path / "x")["b"].equal(torch.ones(2))
