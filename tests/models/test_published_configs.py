"""Files as they are published: none of their fields is refused.

``published_configs.json`` holds ``config.json`` files as public repositories quote them, by the
names of the models; some quotes leave out tokens and initial values, and ``_source`` says where
newer ones are from. Those that begin with "a" show the fields of a version of transformers, with
other sizes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stateline.errors import InputError
from stateline.models.convert.table import (
    CONVERTERS,
    load_pretrained,
    read_pretrained,
    write_pretrained,
)
from stateline.models.convert.weights import Weights
from tests.models.published import (
    QWEN,
    assert_near,
    assert_same_tensors,
    official_model,
    saved,
    tokens,
    transformers,
)

pytestmark = pytest.mark.cpu  # what is tested are files

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text("utf-8")
)
for settings in PUBLISHED.values():
    settings.pop("_source", None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_field_of_a_published_file_is_refused(name: str) -> None:
    settings = PUBLISHED[name]
    (converter,) = (c for c in CONVERTERS.values() if c.recognises(settings, ()))
    assert converter.config(settings).vocab_size > 1000


@torch.no_grad()
def test_minimax_rotates_the_entries_that_its_authors_rotate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers ignores ``rotary_dim``, with which the models were trained."""
    assert CONVERTERS["minimax"].config(PUBLISHED["MiniMax-Text-01"]).layers["attention"] == {
        "n_heads": 64,
        "n_kv_heads": 8,
        "d_head": 128,
        "position": "rope(base=10000000.0, fraction=0.5)",
    }
    official, rotated = saved("minimax", tmp_path / "hf"), 4  # of 8
    modeling = sys.modules[type(official).__module__]
    rotate = modeling.apply_rotary_pos_emb

    def first_entries(q: Any, k: Any, *cos_sin: Any) -> Any:
        turned = rotate(q[..., :rotated], k[..., :rotated], *cos_sin)
        rest = (q[..., rotated:], k[..., rotated:])
        return tuple(torch.cat(pair, dim=-1) for pair in zip(turned, rest, strict=True))

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", first_entries)
    official.model.rotary_emb.inv_freq = 1e6 ** -(torch.arange(0, rotated, 2) / rotated)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rotary_dim": rotated}))
    found = read_pretrained(tmp_path / "hf")
    assert_near(found.model(tokens()), official(tokens()).logits)
    write_pretrained(found.model, tmp_path / "back", "minimax")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rotary_dim"] == rotated
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")


def test_the_inner_width_of_falcon_mamba_is_the_stated_one() -> None:
    config = CONVERTERS["mamba-hf"].config(PUBLISHED["falcon-mamba-7b"])
    assert config.layers["mamba"]["expand"] == 2


@torch.no_grad()
def test_the_text_part_of_a_qwen_that_reads_images_is_read(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(
        "qwen3_5", text_config={**QWEN, "model_type": "qwen3_5_text"}, vision_config=vision
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    found = read_pretrained(tmp_path)
    official = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_near(found.model(tokens()), official(tokens()).logits)
    assert any(name.startswith("model.visual.") for name in found.ignored)


@pytest.mark.parametrize("kind", ["mistral", "ministral"])
@torch.no_grad()
def test_a_mistral_with_layer_types_is_a_ministral_and_goes_back(kind: str, tmp_path: Path) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    saved("mistral", tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    settings |= {"model_type": kind, **types}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    found = read_pretrained(tmp_path / "hf")
    assert found.model.config.pattern == "sliding_attention attention"
    official = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert_near(found.model(tokens()), official(tokens()).logits)
    write_pretrained(found.model, tmp_path / "back", "mistral")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["model_type"], *written["architectures"]) == (
        "ministral",
        "MinistralForCausalLM",
    )
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    assert_near(load_pretrained(tmp_path / "back")(tokens()), official(tokens()).logits)


@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt_neox", "gpt_neox."), ("mamba2", "backbone."), ("llama", "model.")]
)
@torch.no_grad()
def test_the_first_part_of_names_may_be_missing(name: str, prefix: str, tmp_path: Path) -> None:
    official = saved(name, tmp_path)
    tensors = {n.removeprefix(prefix): t.clone() for n, t in Weights(tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_near(load_pretrained(tmp_path)(tokens()), official(tokens()).logits)


@torch.no_grad()
def test_files_may_hold_all_experts_in_one_tensor(tmp_path: Path) -> None:
    official = saved("qwen3_5_moe_text", tmp_path)
    tensors = {n: t.clone() for n, t in Weights(tmp_path).items() if ".experts." not in n}
    whole = {n: t.clone() for n, t in official.state_dict().items() if ".experts." in n}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in whole)
    save_file({**tensors, **whole}, tmp_path / "model.safetensors")
    assert_near(load_pretrained(tmp_path)(tokens()), official(tokens()).logits)


@torch.no_grad()
def test_convolutions_of_an_olmo_hybrid_may_be_cut_anywhere(tmp_path: Path) -> None:
    official = official_model("olmo_hybrid", linear_value_head_dim=12)
    official.save_pretrained(tmp_path / "hf")
    found = read_pretrained(tmp_path / "hf")
    assert_near(found.model(tokens()), official(tokens()).logits)
    write_pretrained(found.model, tmp_path / "back", found.format)
    rows = [
        len(Weights(tmp_path / "back")[f"model.layers.0.linear_attn.{n}_conv1d.weight"])
        for n in "qkv"
    ]
    assert rows == [24, 24, 48]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert again(tokens()).logits.equal(official(tokens()).logits)


@torch.no_grad()
def test_the_dense_layers_of_kimi_linear_have_other_names_in_published_files(
    tmp_path: Path,
) -> None:
    official = saved("kimi_linear", tmp_path)
    dense = "layers.0.block_sparse_moe."
    found = Weights(tmp_path).items()
    tensors = {n.replace(dense, "layers.0.mlp."): tensor.clone() for n, tensor in found}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_near(load_pretrained(tmp_path)(tokens()), official(tokens()).logits)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((32,), float("nan")), "'model.norm.weight' holds values that are not finite"),
        (torch.ones(32).to(torch.float8_e4m3fn), "'model.norm.weight' is stored as float8_e4m3fn"),
        (torch.ones(32, dtype=torch.int8), "'model.norm.weight' is stored as int8"),
    ],
)
def test_weights_that_are_no_numbers_are_named(
    value: torch.Tensor, message: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    tensors = {name: tensor.clone() for name, tensor in Weights(tmp_path).items()}
    save_file({**tensors, "model.norm.weight": value}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message) as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "bamba", "nemotron_h"])
def test_zero_biases_of_convolutions_are_kept_on_the_way_back(name: str, tmp_path: Path) -> None:
    official = official_model(name)
    with torch.no_grad():
        for key, parameter in official.named_parameters():
            if "conv1d.bias" in key:
                parameter.zero_()
    official.save_pretrained(tmp_path / "hf")
    found = read_pretrained(tmp_path / "hf")
    write_pretrained(found.model, tmp_path / "back", found.format)
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")


def test_a_field_that_is_not_known_is_refused_by_name_unless_it_is_null(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    message = "something=3 has no counterpart here: .* convert it with --settings"
    with pytest.raises(InputError, match=message):
        load_pretrained(tmp_path, settings={"something": 3})
    assert load_pretrained(tmp_path, settings={"something": None}).config.d_model == 32
