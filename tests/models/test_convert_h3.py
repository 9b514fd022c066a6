import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import H3
from stateline.models.checkpoint import load_model, save_model
from stateline.models.convert.h3 import released_names
from stateline.models.convert.single_layers import read_layer
from stateline.models.convert.table import load_pretrained
from stateline.models.language_model import LanguageModel

pytestmark = pytest.mark.cpu  # what is tested are files

SETTINGS = {"num_heads": 2}
LAYER = {
    "ssm_k_D": (8,),
    "D": (4,),
    "ssm_k_kernel.kernel.B": (8, 4),
    "ssm_k_kernel.kernel.C": (1, 8, 4),
    "kernel.kernel.C": (1, 4, 2, 2),
    "kernel.kernel.log_dt": (4,),
    "kernel.kernel.B": (4, 2, 2),
    "kernel.kernel.inv_A_real": (4, 2),
    "kernel.kernel.A_imag": (4, 2),
}


def official() -> dict[str, Tensor]:
    """A state dict as the official code writes it."""
    torch.manual_seed(0)
    linear = {f"mixer.{p}_proj": (8, 8) for p in "qkv"} | {"mixer.output_linear": (8, 8)}
    attention = {"mixer.Wqkv": (24, 8), "mixer.out_proj": (8, 8)}
    mlp = {"mlp.fc1": (32, 8), "mlp.fc2": (8, 32)}
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.word_embeddings.weight": (11, 8)}
    for number, maps in enumerate((linear | mlp, attention | mlp)):
        for name, (rows, columns) in maps.items():
            shapes[f"backbone.layers.{number}.{name}.weight"] = (rows, columns)
            shapes[f"backbone.layers.{number}.{name}.bias"] = (rows,)
        for name in (f"backbone.layers.{number}.norm{n}" for n in (1, 2)):
            shapes |= {f"{name}.weight": (8,), f"{name}.bias": (8,)}
    shapes |= {f"backbone.layers.0.mixer.{name}": shape for name, shape in LAYER.items()}
    shapes |= {"backbone.ln_f.weight": (8,), "backbone.ln_f.bias": (8,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return tensors | {"lm_head.weight": tensors["backbone.embeddings.word_embeddings.weight"]}


def logits(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(7)[None])


def loaded_logits(source: Path | dict[str, Tensor]) -> Tensor:
    return logits(load_pretrained(source, settings=SETTINGS))


def test_queries_keys_and_values_are_joined_in_that_order() -> None:
    tensors = official()
    layer = load_pretrained(tensors, settings=SETTINGS).stack.layers[0].layer
    for ours, name in zip(layer.qkv.weight.chunk(3), "qkv", strict=True):
        assert torch.equal(ours, tensors[f"backbone.layers.0.mixer.{name}_proj.weight"])


def test_the_two_orders_of_heads_permute_the_inputs_of_the_last_projection() -> None:
    layers = [
        load_pretrained(official(), settings={**SETTINGS, "head_order": order})
        .stack.layers[0]
        .layer
        for order in ("fused", "pytorch")
    ]
    fused, slow = (layer.out_proj.weight for layer in layers)
    assert torch.equal(slow.view(8, 4, 2), fused.view(8, 2, 4).transpose(1, 2))
    assert not torch.equal(slow, fused)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_loads_as_its_tensors_do(tmp_path: Path, suffix: str) -> None:
    tensors, path = official(), tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save(tensors, path)
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    assert torch.equal(
        logits(load_pretrained(path, settings=SETTINGS)),
        logits(load_pretrained(tensors, settings=SETTINGS)),
    )


def test_a_checkpoint_of_lightning_loads_as_its_tensors_do(tmp_path: Path) -> None:
    tensors, path = official(), tmp_path / "last.ckpt"
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"pytorch-lightning_version": "1.8.6", "epoch": 3, "state_dict": state}, path)
    assert torch.equal(
        logits(load_pretrained(path, settings=SETTINGS)),
        logits(load_pretrained(tensors, settings=SETTINGS)),
    )


def test_a_loaded_model_is_saved_and_read_as_one_of_ours(tmp_path: Path) -> None:
    model = load_pretrained(official(), settings=SETTINGS)
    save_model(model, tmp_path)
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_a_file_that_holds_more_than_tensors_is_not_run(tmp_path: Path) -> None:
    torch.save({"model": Path("x")}, tmp_path / "model.pt")
    with pytest.raises(InputError, match="cannot read the weights"):
        load_pretrained(tmp_path / "model.pt", settings=SETTINGS)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.pt"):
        load_pretrained(tmp_path / "nowhere.pt", settings=SETTINGS)


def test_norms_of_older_files_belong_to_the_branch_after() -> None:
    older = {
        "norm.weight": "layers.0.norm1.weight",
        "layers.0.norm1.weight": "layers.0.norm2.weight",
        "layers.0.norm2.weight": "layers.1.norm1.weight",
        "layers.1.norm1.weight": "layers.1.norm2.weight",
        "layers.1.norm2.weight": "ln_f.weight",
    }
    names = released_names([f"s4seq.encoder.{name}" for name in older])
    assert names == {f"s4seq.encoder.{old}": f"backbone.{new}" for old, new in older.items()}


def test_a_tensor_that_is_missing_is_named() -> None:
    tensors = official()
    del tensors["backbone.layers.0.mixer.k_proj.bias"]
    with pytest.raises(InputError, match=r"lack 'backbone\.layers\.0\.mixer\.k_proj\.bias'"):
        load_pretrained(tensors, settings=SETTINGS)


def test_a_tensor_that_nobody_knows_is_named() -> None:
    tensors = official() | {"backbone.layers.0.mixer.extra": torch.ones(1)}
    with pytest.raises(InputError, match=r"hold 'backbone\.layers\.0\.mixer\.extra'"):
        load_pretrained(tensors, settings=SETTINGS)


def test_a_tensor_of_another_shape_is_named() -> None:
    tensors = official() | {"backbone.layers.0.mixer.D": torch.ones(8)}
    with pytest.raises(InputError, match=re.escape("wants the shape (8, 2, 2), got (4, 2, 2)")):
        load_pretrained(tensors, settings=SETTINGS)


def test_an_output_map_of_its_own_is_refused() -> None:
    tensors = official() | {"lm_head.weight": torch.zeros(11, 8)}
    with pytest.raises(InputError, match=r"lm_head\.weight must be the embedding"):
        load_pretrained(tensors, settings=SETTINGS)


def test_rotary_positions_are_those_of_the_file() -> None:
    tensors = official() | {"backbone.layers.1.mixer.rotary_emb.inv_freq": torch.ones(1)}
    attention = load_pretrained(tensors, settings=SETTINGS).config.layers["attention"]
    assert attention["position"] == "rope(fraction=0.5)"


def test_an_unknown_order_of_heads_is_refused() -> None:
    with pytest.raises(InputError, match="slow"):
        load_pretrained(official(), settings={**SETTINGS, "head_order": "slow"})


def test_several_official_filters_of_a_head_are_several_outputs() -> None:
    tensors = official()
    tensors["backbone.layers.0.mixer.kernel.kernel.C"] = torch.randn(2, 4, 2, 2)
    layer = H3(8, d_state=4, d_head=2, n_outputs=2)
    mixer = {
        name.removeprefix("backbone.layers.0.mixer."): tensor
        for name, tensor in tensors.items()
        if name.startswith("backbone.layers.0.mixer.")
    }
    assert read_layer("h3_fused", mixer)["diagonal.c"].shape == layer.diagonal.c.shape
