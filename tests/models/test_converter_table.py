"""What holds for every format in the table of converters."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stateline.errors import InputError
from stateline.models.convert.table import CONVERTERS, read_pretrained, write_pretrained
from stateline.models.convert.weights import Weights
from tests.models.published import (
    FOLDERS,
    LIMITS,
    MODELS,
    assert_near,
    assert_same_tensors,
    official_model,
    tokens,
    transformers,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
]  # models of twenty formats, each made by transformers

ORDERED = [name for name, (kind, _) in MODELS.items() if name == kind]
"""One model of each family of transformers."""


def weights_file(folder: Path, name: str) -> Path:
    """The file with the weights of a format."""
    return folder / CONVERTERS[name].file


def read(path: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in Weights(path).items()}


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def test_every_format_has_a_model_here_and_a_way_back_or_a_reason() -> None:
    assert FOLDERS.keys() == CONVERTERS.keys()
    for name, converter in CONVERTERS.items():
        assert bool(converter.settings) != bool(converter.one_way), name


@pytest.mark.parametrize("name", FOLDERS)
def test_what_was_recognised_missing_and_left_over_is_said(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    FOLDERS[name](folder)
    found = read_pretrained(folder)
    assert found.format == name
    path = weights_file(folder, name)
    tensors, tied = read(path), ("lm_head.weight", "embed_out.weight")
    unused = set(found.ignored)
    assert all(key.endswith((*tied, "inv_freq", "attn_buf")) for key in unused)
    needed = sorted(tensors.keys() - unused)
    for gone in (needed[0], needed[-1]):
        write(path, {key: tensor for key, tensor in tensors.items() if key != gone})
        with pytest.raises(InputError) as caught:
            read_pretrained(folder)
        assert "\n" not in str(caught.value)
    write(path, {**tensors, "surplus": torch.ones(2)})
    with pytest.raises(InputError, match="'surplus'"):
        read_pretrained(folder)
    for shape in ((), (3,), (5, 2, 1)):
        write(path, {**tensors, needed[-1]: torch.ones(shape)})
        with pytest.raises(InputError) as caught:
            read_pretrained(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in FOLDERS if CONVERTERS[name].settings])
def test_the_way_back_gives_the_same_tensors(name: str, tmp_path: Path) -> None:
    FOLDERS[name](tmp_path / "theirs")
    found = read_pretrained(tmp_path / "theirs")
    write_pretrained(found.model, tmp_path / "back", name)
    paths = [weights_file(tmp_path / folder, name) for folder in ("theirs", "back")]
    wanted, got = (Weights(path) for path in paths)
    assert wanted.keys() == got.keys()
    for key, tensor in wanted.items():
        if not key.endswith("embed_positions.weight"):  # OPT never reads the first two rows
            assert got[key].equal(tensor), key
    assert read_pretrained(tmp_path / "back").model(tokens()).equal(found.model(tokens()))


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, but those mapped from files."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.storages and not mapped(storage.data_ptr()):
                    self.storages[reference.cdata] = reference, storage.nbytes()
        self.storages = {k: (r, n) for k, (r, n) in self.storages.items() if not r.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


def mapped(address: int) -> bool:
    """Whether memory is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return inode != "0"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_in_memory_once_while_they_are_read(name: str, tmp_path: Path) -> None:
    """One tensor may be there twice, as it is copied."""
    FOLDERS[name](tmp_path / "theirs")
    with Allocated() as allocated:
        model = read_pretrained(tmp_path / "theirs").model
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert sum(sizes) <= allocated.peak <= sum(sizes) + buffers + 2 * max(sizes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ORDERED)
@torch.no_grad()
def test_shards_half_precision_and_tied_weights(name: str, tied: bool, tmp_path: Path) -> None:
    if name == "zamba2" and not tied:
        pytest.skip("transformers shares neither embeddings nor blocks then, and we refuse")
    official = official_model(name, tie_word_embeddings=tied).bfloat16()
    official.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    found = read_pretrained(tmp_path / "theirs")
    head, embedding = official.get_output_embeddings(), official.get_input_embeddings()
    assert found.model.config.tie_embeddings is (head.weight is embedding.weight)
    assert found.model.embedding.weight.dtype == torch.bfloat16
    write_pretrained(found.model, tmp_path / "back", found.format)
    assert_same_tensors(tmp_path / "back", tmp_path / "theirs")
    wide = read_pretrained(tmp_path / "theirs", dtype=torch.float32).model
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32
    )
    assert_near(wide(tokens()), again.eval()(tokens()).logits, LIMITS.get(found.format, 6e-6))
