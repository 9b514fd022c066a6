"""Published Mamba and Mamba-2: both formats, every option, and what is wrong with some files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import Mamba, Mamba2, Residual
from stateline.models.config import ModelConfig
from stateline.models.convert.mamba import mamba_config, official_mamba_config
from stateline.models.convert.table import load_pretrained, write_pretrained
from stateline.models.language_model import LanguageModel

pytestmark = pytest.mark.cpu  # what is tested are files

TOKENS = torch.tensor([[1, 2, 0, 4, 3, 3]])

HUGGING_FACE: dict[str, dict[str, Any]] = {
    "mamba": {
        "model_type": "mamba",
        "vocab_size": 5,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "state_size": 3,
        "time_step_rank": 2,
    },
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": 5,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "state_size": 3,
        "head_dim": 4,
        "num_heads": 4,
        "n_groups": 2,
        "tie_word_embeddings": True,
    },
}
OFFICIAL: dict[str, dict[str, Any]] = {
    "mamba": {
        "d_model": 8,
        "n_layer": 2,
        "vocab_size": 5,
        "ssm_cfg": {"d_state": 3, "dt_rank": 2},
    },
    "mamba2": {
        "d_model": 8,
        "n_layer": 2,
        "vocab_size": 5,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 3, "headdim": 4, "ngroups": 2},
    },
}


def official(kind: str, *, bias: bool = False, vocab: int = 8) -> dict[str, Tensor]:
    """Random tensors by official names: inner width 16, states of 3, rank 2 or 4 heads."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"A_log": (16, 3), "D": (16,), "in_proj.weight": (32, 8)}
    shapes |= {"conv1d.weight": (16, 1, 4), "conv1d.bias": (16,), "x_proj.weight": (8, 16)}
    shapes |= {"dt_proj.weight": (16, 2), "dt_proj.bias": (16,), "out_proj.weight": (8, 16)}
    if kind == "mamba2":
        shapes = {"A_log": (4,), "D": (4,), "dt_bias": (4,), "in_proj.weight": (48, 8)}
        shapes |= {"conv1d.weight": (28, 1, 4), "conv1d.bias": (28,), "norm.weight": (16,)}
        shapes |= {"out_proj.weight": (8, 16)}
    if bias:
        shapes |= {"in_proj.bias": shapes["in_proj.weight"][:1], "out_proj.bias": (8,)}
    named = {
        f"backbone.layers.{layer}.mixer.{n}": shape
        for layer in (0, 1)
        for n, shape in shapes.items()
    }
    named |= {f"backbone.layers.{layer}.norm.weight": (8,) for layer in (0, 1)}
    named |= {"backbone.embedding.weight": (vocab, 8), "backbone.norm_f.weight": (8,)}
    return {name: torch.randn(shape) / 2 for name, shape in named.items()}


def as_hugging_face(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.replace("embedding.", "embeddings."): t[:5] if "embedd" in n else t
            for n, t in tensors.items()}  # fmt: skip


def config(settings: dict[str, Any]) -> ModelConfig:
    return (official_mamba_config if "ssm_cfg" in settings else mamba_config)(settings)


def mixer(model: LanguageModel) -> Mamba | Mamba2:
    first = model.stack.links[0]
    assert isinstance(first, Residual)
    assert isinstance(first.layer, Mamba | Mamba2)
    return first.layer


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_both_formats_are_the_same_model(kind: str) -> None:
    one = load_pretrained(official(kind), settings=OFFICIAL[kind])
    other = load_pretrained(as_hugging_face(official(kind)), settings=HUGGING_FACE[kind])
    torch.testing.assert_close(one(TOKENS)[..., :5], other(TOKENS))


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_folder_is_what_is_in_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL[kind]))
    torch.save(official(kind), tmp_path / "pytorch_model.bin")
    wanted = load_pretrained(official(kind), settings=OFFICIAL[kind])(TOKENS)
    assert torch.equal(load_pretrained(tmp_path)(TOKENS), wanted)
    save_file(official(kind), tmp_path / "model.safetensors")
    assert torch.equal(load_pretrained(tmp_path)(TOKENS), wanted)


def test_the_official_vocabulary_is_padded() -> None:
    assert config(OFFICIAL["mamba"]).vocab_size == 8
    assert config({**OFFICIAL["mamba"], "pad_vocab_size_multiple": 1}).vocab_size == 5
    assert mamba_config(HUGGING_FACE["mamba"]).vocab_size == 5


def test_the_official_filter_begins_with_the_oldest_input() -> None:
    tensors = official("mamba")
    kernel = tensors["backbone.layers.0.mixer.conv1d.weight"][:, 0]
    found = mixer(load_pretrained(tensors, settings=OFFICIAL["mamba"])).conv.kernel
    assert torch.equal(found, kernel.flip(-1))


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_biases_of_the_convolution_are_there_if_the_settings_say_so(kind: str) -> None:
    tensors = {n: t for n, t in official(kind).items() if "conv1d.bias" not in n}
    with pytest.raises(InputError, match=r"lack 'backbone.layers.0.mixer.conv1d.bias'"):
        load_pretrained(tensors, settings=OFFICIAL[kind])
    settings = {**OFFICIAL[kind], "ssm_cfg": {**OFFICIAL[kind]["ssm_cfg"], "conv_bias": False}}
    assert mixer(load_pretrained(tensors, settings=settings)).conv.bias is None


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_biases_of_the_maps_are_read(kind: str) -> None:
    settings = {**OFFICIAL[kind], "ssm_cfg": {**OFFICIAL[kind]["ssm_cfg"], "bias": True}}
    tensors = official(kind, bias=True)
    found = mixer(load_pretrained(tensors, settings=settings)).out_proj.bias
    assert torch.equal(found, tensors["backbone.layers.0.mixer.out_proj.bias"])


def test_an_output_map_of_its_own_is_read() -> None:
    tensors = {**official("mamba"), "lm_head.weight": torch.randn(8, 8)}
    model = load_pretrained(tensors, settings={**OFFICIAL["mamba"], "tie_embeddings": False})
    assert model.head is not None
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


def test_a_copy_of_the_embedding_may_be_there_but_nothing_else_in_its_place() -> None:
    tensors = official("mamba")
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"].clone()
    assert load_pretrained(tensors, settings=OFFICIAL["mamba"]).head is None
    with pytest.raises(InputError, match=r"lm_head\.weight must be the embedding"):
        load_pretrained(
            {**tensors, "lm_head.weight": torch.zeros(8, 8)}, settings=OFFICIAL["mamba"]
        )


def test_layer_normalisation_has_its_biases() -> None:
    tensors = official("mamba")
    for name in [name for name in tensors if "norm" in name]:
        tensors[name.replace("weight", "bias")] = torch.ones(8)
    model = load_pretrained(tensors, settings={**OFFICIAL["mamba"], "rms_norm": False})
    assert model.config.norm == "layer"
    assert torch.equal(model.get_parameter("norm.bias"), torch.ones(8))


def test_half_precision_is_kept_but_not_for_what_accumulates() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in official("mamba").items()}
    model = load_pretrained(tensors, settings=OFFICIAL["mamba"])
    assert model.embedding.weight.dtype == mixer(model).in_proj.weight.dtype == torch.bfloat16
    assert mixer(model).a_log.dtype == mixer(model).conv.kernel.dtype == torch.float32
    assert model(TOKENS).dtype == torch.bfloat16


@torch.no_grad()
def test_an_inner_width_that_is_no_multiple_is_written_for_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="reads the models")
    model = LanguageModel(ModelConfig("mamba(expand=1.5)*2", 8, 8, norm="rms")).eval()
    write_pretrained(model, tmp_path / "mamba", "mamba-hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mamba").eval()
    assert torch.allclose(theirs(TOKENS).logits, model(TOKENS), atol=1e-6)
    second = LanguageModel(ModelConfig("mamba2(expand=1.5, d_head=4)*2", 8, 8, norm="rms"))
    with pytest.raises(InputError, match=r"an integer as expand, got 1\.5: use the format mamba"):
        write_pretrained(second, tmp_path / "mamba2", "mamba-hf")
    write_pretrained(second, tmp_path / "mamba2", "mamba")


def test_infinity_may_be_written_in_any_way() -> None:
    for limit in (float("inf"), "Infinity", {"__float__": "Infinity"}):
        settings = {**HUGGING_FACE["mamba2"], "time_step_limit": [0.0, limit]}
        assert mamba_config(settings) == mamba_config(HUGGING_FACE["mamba2"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**HUGGING_FACE["mamba"], "hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (
            {**HUGGING_FACE["mamba2"], "time_step_limit": [0.01, 1.0]},
            "limited step sizes are not supported",
        ),
        (
            {**HUGGING_FACE["mamba2"], "time_step_limit": 7},
            "step sizes are not supported, got .*=7",
        ),
        ({**HUGGING_FACE["mamba2"], "time_step_limit": [0, "x"]}, r"got .*=\[0, 'x'\]"),
        ({**OFFICIAL["mamba"], "ssm_cfg": [1]}, r"'ssm_cfg' to be an object, got \[1\]"),
        ({**OFFICIAL["mamba"], "rms_norm": "no"}, "'rms_norm' to be true or false, got 'no'"),
        ({**HUGGING_FACE["mamba"], "hidden_size": "8"}, "'hidden_size', an integer"),
        ({**OFFICIAL["mamba"], "attn_layer_idx": [1]}, r"attn_layer_idx=\[1\] is not supp"),
        ({**OFFICIAL["mamba"], "d_intermediate": 16}, "d_intermediate=16 is not supported"),
        ({**OFFICIAL["mamba"], "ssm_cfg": {"layer": "Mamba3"}}, "'Mamba1' or 'Mamba2', got 'Ma"),
        (
            {**OFFICIAL["mamba2"], "ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}},
            "rmsnorm=False is not supported",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(settings)


def test_missing_and_unexpected_tensors_are_named() -> None:
    tensors = official("mamba")
    del tensors["backbone.layers.1.mixer.D"]
    with pytest.raises(InputError, match=r"lack 'backbone\.layers\.1\.mixer\.D'"):
        load_pretrained(tensors, settings=OFFICIAL["mamba"])
    with pytest.raises(InputError, match=r"hold 'backbone\.layers\.2\.norm\.weight'"):
        load_pretrained(
            {**official("mamba"), "backbone.layers.2.norm.weight": torch.ones(8)},
            settings=OFFICIAL["mamba"],
        )
