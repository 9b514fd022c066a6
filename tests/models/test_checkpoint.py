import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.files import sha256
from stateline.models.checkpoint import check_manifest, load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.factory import make_empty_model, make_model
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters

pytestmark = pytest.mark.cpu  # what is tested are files

CONFIG = ModelConfig("attention(position=hard_alibi) h3", vocab_size=9, d_model=8, norm="rms")
TOKENS = torch.arange(9)[None]


def new_model(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(CONFIG).eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(new_model(), tmp_path)
    return tmp_path


def test_a_loaded_model_gives_the_same_logits_to_the_bit(saved: Path) -> None:
    loaded = load_model(saved)
    assert loaded(TOKENS).equal(new_model()(TOKENS))
    assert loaded.config == CONFIG
    assert not loaded.training


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    save_model(new_model(), tmp_path / "a" / "b")
    assert load_model(tmp_path / "a" / "b").config == CONFIG


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_model(folder)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_published_model_is_told_from_a_damaged_one(saved: Path) -> None:
    (saved / "hashes.json").unlink()
    (saved / "config.json").write_text('{"model_type": "llama", "architectures": []}')
    assert refusal(saved).endswith(
        "is of a published model, 'llama': read it with load_pretrained, or write it in our format "
        "with stateline convert"
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert refusal(saved) == f"no model in {saved}: {name} is missing; give the folder of a model"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_file_is_found_by_its_hash(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[-3] ^= 1
    (saved / name).write_bytes(bytes(content))
    assert "damaged" in refusal(saved)


def test_weights_of_several_precisions_are_refused(saved: Path) -> None:
    (saved / "hashes.json").unlink()
    tensors = load_file(saved / "model.safetensors")
    name = next(name for name in tensors if name.startswith("norm") or ".norm" in name)
    tensors[name] = tensors[name].double()
    save_file(tensors, saved / "model.safetensors")
    assert "is torch.float32, but" in refusal(saved)


def test_adapters_beside_a_model_are_refused(saved: Path) -> None:
    (saved / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "which would not be applied: merge them" in refusal(saved)


def test_a_folder_of_an_older_version_has_no_hashes(saved: Path) -> None:
    (saved / "hashes.json").unlink()
    config = json.loads((saved / "config.json").read_text())
    del config["kind"]
    (saved / "config.json").write_text(json.dumps(config))
    assert load_model(saved).config == CONFIG


def test_hashes_can_cover_any_files(tmp_path: Path) -> None:
    check_manifest(tmp_path)
    (tmp_path / "b").write_text("b")
    (tmp_path / "hashes.json").write_text(json.dumps({"b": sha256(tmp_path / "b")}))
    check_manifest(tmp_path)
    (tmp_path / "b").write_text("c")
    with pytest.raises(InputError, match=f"{tmp_path}/b is damaged or was changed"):
        check_manifest(tmp_path)
    (tmp_path / "b").unlink()
    with pytest.raises(InputError, match=rf"cannot read the file {tmp_path}/b: No such file"):
        check_manifest(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "hashes.json"])
def test_a_file_that_is_not_regular_is_not_opened(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    assert f"{name}: it is a pipe; give a regular file" in refusal(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": torch.ones(8, dtype=torch.int64)}, "'norm.weight' must be like"),
        ({"norm.weight": torch.full((8,), torch.nan)}, "are not all finite, see 'norm.weight'"),
        ({"other": torch.ones(8)}, "only one of them has 'other'"),
    ],
)
def test_unfit_weights_are_named(saved: Path, change: dict[str, Tensor], message: str) -> None:
    save_file({**load_file(saved / "model.safetensors"), **change}, saved / "model.safetensors")
    (saved / "hashes.json").unlink()
    assert message in refusal(saved)


def test_loading_needs_no_memory_for_initial_weights(saved: Path) -> None:
    model = make_empty_model(CONFIG)
    assert all(p.is_meta for p in model.parameters())
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built() -> None:
    config = ModelConfig("lstm", vocab_size=1 << 24, d_model=1 << 20)
    with pytest.raises(InputError, match=r"need 98,304.0 GiB, and this machine has"):
        make_model(config)
    assert count_parameters(config) > 1 << 43


def test_making_a_model_draws_the_weights_that_building_it_draws() -> None:
    torch.manual_seed(0)
    made = make_model(CONFIG).state_dict()
    assert all(made[name].equal(t) for name, t in new_model().state_dict().items())


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_weights_are_refused(saved: Path, kept: int) -> None:
    (saved / "hashes.json").unlink()
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert refusal(saved).startswith(f"the model in {saved} is damaged: ")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"pattern": "h3"}'])
def test_a_damaged_configuration_is_refused(saved: Path, content: bytes) -> None:
    (saved / "hashes.json").unlink()
    (saved / "config.json").write_bytes(content)
    assert "configuration" in refusal(saved) or "damaged" in refusal(saved)


@pytest.mark.parametrize("pattern", ["h3", "attention(bias=true) h3", "attention s4d"])
def test_weights_of_another_configuration_are_refused(saved: Path, pattern: str) -> None:
    (saved / "hashes.json").unlink()
    (saved / "config.json").write_text(ModelConfig(pattern, 9, 8, norm="rms").to_json())
    assert f"the weights in {saved} do not fit its config.json" in refusal(saved)


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    save_file({**weights, "norm.weight": torch.ones(4)}, saved / "model.safetensors")
    (saved / "hashes.json").unlink()
    assert "'norm.weight' must have the shape (8,), got (4,)" in refusal(saved)


def test_a_path_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"cannot write {tmp_path}/file/run/model.safetensors"):
        save_model(new_model(), tmp_path / "file" / "run")


@pytest.mark.parametrize("room", [10, 1000])
def test_a_save_that_fails_leaves_the_old_model(
    saved: Path, room: int, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    with full_disk(room), pytest.raises(InputError, match=r"cannot write .*: .*too large"):
        save_model(new_model(seed=1), saved)
    assert load_model(saved)(TOKENS).equal(new_model()(TOKENS))
    assert {path.name for path in saved.iterdir()} == {
        "config.json",
        "model.safetensors",
        "hashes.json",
    }
