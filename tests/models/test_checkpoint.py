from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stateline.errors import InputError
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert refusal(saved) == f"no model in {saved}: {name} is missing"


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_weights_are_refused(saved: Path, kept: int) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert refusal(saved).startswith(f"the model in {saved} is damaged: ")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"pattern": "h3"}'])
def test_a_damaged_configuration_is_refused(saved: Path, content: bytes) -> None:
    (saved / "config.json").write_bytes(content)
    assert "configuration" in refusal(saved) or "damaged" in refusal(saved)


@pytest.mark.parametrize("pattern", ["h3", "attention(bias=true) h3", "attention s4d"])
def test_weights_of_another_configuration_are_refused(saved: Path, pattern: str) -> None:
    (saved / "config.json").write_text(ModelConfig(pattern, 9, 8, norm="rms").to_json())
    assert f"the weights in {saved} do not fit its config.json" in refusal(saved)


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    save_file({**weights, "norm.weight": torch.ones(4)}, saved / "model.safetensors")
    assert "differ in 'norm.weight'" in refusal(saved)


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
    assert {path.name for path in saved.iterdir()} == {"config.json", "model.safetensors"}
