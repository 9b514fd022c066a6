"""Families of transformers: read exactly, cut anywhere, and written back tensor for tensor."""

import contextlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stateline.cli import main
from stateline.errors import InputError
from stateline.layers import Attention
from stateline.models.config import ModelConfig
from stateline.models.convert import table
from stateline.models.convert.table import (
    CONVERTERS,
    MISSING,
    load_pretrained,
    read_pretrained,
    write_pretrained,
)
from stateline.models.convert.weights import Weights
from stateline.models.factory import meta_model
from stateline.models.language_model import LanguageModel
from tests.models.published import (
    FAMILIES,
    LIMITS,
    MODELS,
    YARN,
    assert_near,
    assert_same_tensors,
    official_model,
    saved,
    tiny_tokenizer,
    tokens,
    transformers,
)

pytestmark = pytest.mark.cpu  # what is tested are files


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_family_is_the_same_function_cut_anywhere_and_goes_back(
    name: str, tmp_path: Path
) -> None:
    official = saved(name, tmp_path / "hf")
    found = read_pretrained(tmp_path / "hf")
    model, x = found.model, tokens()
    wanted, limit = official(x).logits, LIMITS.get(found.format, 6e-6)
    assert_near(model(x), wanted, limit)
    assert all(parameter.is_contiguous() for parameter in model.parameters())

    start, pieces, state = 0, [], model.init_state(2)
    for length in (1, 7, 0, 9, 1, 2):
        y, state = model.forward_chunk(x[:, start : start + length], state)
        pieces.append(y)
        start += length
    for token in x[:, start:].T:
        y, state = model.step(token, state)
        pieces.append(y[:, None])
    assert_near(torch.cat(pieces, dim=1), wanted, limit)

    write_pretrained(model, tmp_path / "back", found.format)
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert_near(again(x).logits, wanted, 1e-6)
    longest = "max_position_embeddings"
    assert getattr(again.config, longest, None) == getattr(official.config, longest, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("unannotated")
@torch.no_grad()
def test_greedy_decoding_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    official, length = saved(name, tmp_path), 48
    limit = getattr(official.config, "max_position_embeddings", length + 4)
    x = tokens(batch=3, length=4)[:, : max(1, limit - length)]
    length = min(length, limit - x.shape[1])
    official.generation_config.eos_token_id = None
    wanted = official.generate(x, max_new_tokens=length, do_sample=False)
    model = load_pretrained(tmp_path)
    logits, state = model.forward_chunk(x, model.init_state(3))
    found = [x, logits[:, -1:].argmax(dim=-1)]
    for _ in range(length - 1):
        y, state = model.step(found[-1][:, 0], state)
        found.append(y.argmax(dim=-1)[:, None])
    assert torch.cat(found, dim=1).equal(wanted)


def test_grouped_queries_keep_only_the_shared_keys(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = load_pretrained(tmp_path)
    assert model.state_bytes(100) == 2 * (2 * 100 * (2 * 8) * 4 + 8) + 8


@pytest.mark.parametrize("name", ["qwen3", "bamba"])
@torch.no_grad()
def test_shards_and_half_precision_are_read_and_written_back(name: str, tmp_path: Path) -> None:
    official = official_model(name).bfloat16()
    official.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    found = read_pretrained(tmp_path / "hf")
    assert found.model.embedding.weight.dtype == torch.bfloat16
    write_pretrained(found.model, tmp_path / "back", found.format)
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    x = tokens()
    wide = load_pretrained(tmp_path / "hf", dtype=torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert_near(wide(x), again.eval()(x).logits)


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        ("qwen3_5_text", "linear_attn.norm.weight"),
        ("olmoe", "mlp.gate.weight"),
        ("gpt2", "ln_1.weight"),
        ("llama", "lm_head.weight"),
    ],
)
@torch.no_grad()
def test_tensors_of_another_precision_get_that_of_the_embedding(
    name: str, wider: str, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    tensors = {
        name: tensor if name.endswith(wider) else tensor.bfloat16()
        for name, tensor in Weights(tmp_path).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_pretrained(tmp_path)
    assert model(tokens()).dtype == torch.bfloat16
    official = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    again = load_pretrained(dict(official.state_dict()), settings=official.config.to_dict())
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert ours.bfloat16().equal(theirs.bfloat16())


def test_tensors_that_are_joined_keep_the_higher_precision(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    tensors = {n: t.bfloat16() if "q_proj" in n else t for n, t in Weights(tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_pretrained(tmp_path).state_dict()
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(wide, tmp_path / "model.safetensors")
    for name, tensor in load_pretrained(tmp_path).state_dict().items():
        assert found[name].equal(tensor), name


@torch.no_grad()
def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = saved("qwen3", tmp_path / "hf")
    limit = 7_000  # less than the embedding, which comes first
    monkeypatch.setattr(table, "SHARD_BYTES", limit)
    write_pretrained(load_pretrained(tmp_path / "hf"), tmp_path / "back", "qwen3")
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    held = [load_file(tmp_path / "back" / name) for name in files]
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in held]
    assert sizes[0] > limit
    for tensors, size in zip(held, sizes, strict=True):
        assert len(tensors) == 1 or 0 < size <= limit
    assert all(one + following > limit for one, following in pairwise(sizes))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert again(tokens()).logits.equal(official(tokens()).logits)


def test_pickled_weights_without_the_first_part_of_their_names_are_read(tmp_path: Path) -> None:
    official = saved("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {n.removeprefix("transformer."): t for n, t in official.state_dict().items()}
    state |= {"h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(1)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = read_pretrained(tmp_path)
    assert_near(found.model(tokens()), official(tokens()).logits)
    assert set(found.ignored) == {"h.0.attn.bias", "h.1.attn.masked_bias", "lm_head.weight"}


def test_older_settings_of_rotary_positions_are_read(tmp_path: Path) -> None:
    official = saved("llama 3 with biases", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert_near(load_pretrained(tmp_path)(tokens()), official(tokens()).logits)


READ = [
    ("llama", {"hidden_size": 34, "head_dim": 8}, "attention.d_head", 8),
    ("bamba", {"partial_rotary_factor": 0.25}, "attention.position", "rope(fraction=0.5)"),
    ("granitemoehybrid", {"num_local_experts": 1}, "moe.experts", 1),
    ("falcon_h1", {"mamba_d_ssm": None, "mamba_n_heads": 8}, "mamba2.expand", 2.0),
    ("lfm2", {"tie_embedding": False}, "tie_embeddings", False),
    ("lfm2", {"block_ffn_dim_multiplier": None}, "feed_forward.d_hidden", 32),
    ("lfm2", {"block_multiple_of": 20}, "feed_forward.d_hidden", 40),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [1]}, "pattern", "gated_conv attention"),
    ("minimax", {"rotary_dim": None}, "attention.n_heads", 4),
]
"""Fields of ``config.json``, and what they mean here."""


@pytest.mark.parametrize(("name", "changed", "place", "value"), READ)
def test_a_field_is_read_as_transformers_reads_it(
    name: str, changed: dict[str, Any], place: str, value: Any
) -> None:
    kind, settings = MODELS[name]
    config = CONVERTERS[kind].config({"model_type": kind, **settings, **changed})
    layer, _, keyword = place.rpartition(".")
    assert (config.layers[layer][keyword] if layer else getattr(config, keyword)) == value


@pytest.mark.parametrize(
    ("name", "changed", "keyword", "value"),
    [
        ("llama with yarn", {}, "truncate", False),
        ("llama with yarn", {"rope_parameters": YARN}, "attention_factor", None),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor", 1.5),
    ],
)
def test_yarn_is_read_as_transformers_reads_it(
    name: str, changed: dict[str, Any], keyword: str, value: float | None
) -> None:
    kind, settings = MODELS[name]
    config = CONVERTERS[kind].config({"model_type": kind, **settings, **changed})
    position = Attention(64, **config.layers["attention"]).settings.position
    assert getattr(position.scaling, keyword) == value


FROM_THE_WIDTH = ("intermediate_size", "lru_width", "mamba_dt_rank", "time_step_rank")
"""Fields without a number of their own where they are missing."""


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in MODELS.values()}))
def test_a_missing_field_has_the_default_of_transformers(kind: str) -> None:
    official = transformers.AutoConfig.for_model(kind).to_dict()
    own = next(converter for converter in CONVERTERS.values() if kind in converter.kinds)
    whole = replace(own.config(official), trained_len=None)
    for name in official.keys() - {"model_type", *FROM_THE_WIDTH}:
        rest = {other: value for other, value in official.items() if other != name}
        with contextlib.suppress(InputError):  # a field that is required
            assert replace(own.config(rest), trained_len=None) == whole, name


REFUSED = [
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' are not supported"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 is not supported in this family",
    ),
    ("gpt_neox", {"rotary_pct": 2.0}, "rotate pairs of entries, got 16 of 8"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("llama", {"num_attention_heads": 0}, "must have 'num_attention_heads', an integer"),
    ("llama", {"is_causal": None}, "is_causal=None is not supported"),
    ("llama", {"num_key_value_heads": True}, "must have 'num_key_value_heads', an integer"),
    ("llama", {"vocab_size": 10**9}, "vocab_size must be at most .*, got 1000000000"),
    ("llama", {"rms_norm_eps": True}, "wants 'rms_norm_eps' to be a number, got True"),
    ("mistral", {"sliding_window": "6"}, "must have 'sliding_window', an integer"),
    ("mixtral", {"sliding_window": "6"}, "must have 'sliding_window', an integer"),
    ("qwen2 with windows", {"sliding_window": "6"}, "must have 'sliding_window', an integer"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported"),
    ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim must be 32 here, got 8"),
    ("gpt_neo", {"attention_types": 3}, "cannot read attention_types=3"),
    ("gpt_neo", {"attention_types": [[["global"], 1]]}, "states 1 layers, and num_layers 4"),
    ("bamba", {"attn_rotary_emb": 8}, "attn_rotary_emb must be 4 here, got 8"),
    ("bamba", {"mamba_n_heads": 7, "mamba_d_head": "auto"}, "hidden_size, 64, got 7"),
    ("bamba", {"time_step_limit": [0.0, 1.0]}, "limited step sizes are not supported"),
    ("granitemoehybrid", {"num_local_experts": -1}, "must have 'num_local_experts', an integer"),
    ("jamba", {"attn_layer_offset": 2}, "attn_layer_offset must be from 0 to 1, got 2"),
    ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset must be from 0 to 1, got -1"),
    ("lfm2", {"layer_types": ["conv"]}, "layer_types must name 2 layers"),
    ("lfm2", {"layer_types": ["conv", "linear"]}, "layers must be .* got 'linear'"),
    ("nemotron_h", {"layers_block_type": ["conv"]}, "layers of a Nemotron-H are .* got 'conv'"),
    ("nemotron_h", {"layers_block_type": ["mlp"] * 513}, "must list 1 to 512 layers, got"),
    ("nemotron_h with experts", {"mlp_bias": True}, "mlp_bias=True is not supported in a model"),
    ("nemotron_h with experts", {"moe_latent_size": 8}, "moe_latent_size=8 is not supported"),
    ("nemotron_h with experts", {"n_group": 2}, "n_group=2 is not supported"),
    ("nemotron_h with experts", {"topk_group": 0}, "topk_group=0 is not supported"),
    ("nemotron_h", {"attention_head_dim": 3}, "attention_head_dim must be .* here, got 3"),
    ("nemotron_h", {"layers_block_type": 3}, "must list 1 to .* layers, got 3"),
    ("qwen3_next", {"num_experts": -8}, "must have 'num_experts', an integer"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate must be false where"),
    ("falcon_h1", {"mamba_d_ssm": 40}, "must be mamba_d_ssm, 40, got 6"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers must be 2 numbers, got"),
    ("falcon_h1", {"lm_head_multiplier": 0.0}, "lm_head_multiplier must be positive, got 0"),
    (
        "minimax",
        {"mlp_alpha_factor": 2.0},
        r"the fields \*_alpha_factor must be equal, got .2.0, 3.5",
    ),
    ("minimax", {"rotary_dim": 3}, "rotary_dim must be even and at most 8, got 3"),
    ("minimax", {"rotary_dim": 10}, "rotary_dim must be even and at most 8, got 10"),
    ("minimax", {"block_size": 8}, "block_size=8 is not supported"),
    (
        "olmo_hybrid",
        {"layer_types": ["linear_attention"] * 4},
        "are of both kinds, got only linear",
    ),
    ("lfm2_moe", {"num_dense_layers": -1}, "must have 'num_dense_layers', an integer"),
    ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads must be 4 here, got 2"),
    ("zamba2", {"layers_block_type": ["mamba"] * 6}, "must have a 'hybrid', got none"),
    ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
    ("zamba2", {"layers_block_type": None}, "layers_block_type must name 6 layers, got none"),
    ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads must be 4 here, got 2"),
    ("kimi_linear", {"v_head_dim": 8}, "v_head_dim must be 12 here, got 8"),
    ("kimi_linear", {"linear_attn_config": {"x": 1}}, "linear_attn_config with x is not supported"),
    (
        "kimi_linear",
        {
            "layer_types": None,
            "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]},
        },
        "full_attn_layers and kda_layers must name each of . layers once",
    ),
    ("xlstm", {"embedding_dim": 64}, "embedding_dim must be 128 here, got 64"),
    ("xlstm", {"num_blocks": 3}, "num_blocks must be 2 here, got 3"),
    ("xlstm", {"qk_dim_factor": 0.0}, "qk_dim_factor must be positive and below a million, got 0"),
    ("qwen3_moe", {"num_local_experts": 3}, "num_experts must be 3 here, got 4"),
    (
        "recurrent_gemma",
        {"block_types": ["mamba"]},
        "must list recurrent and attention",
    ),
    ("recurrent_gemma", {"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        "rope_parameters must be of full_attention and sliding_attention, got rope_theta",
    ),
    (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        r"attn_logit_softcapping=50.0 is not supported, only None is",
    ),
]


@pytest.mark.parametrize(("name", "changed", "message"), REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(
    name: str, changed: dict[str, Any], message: str
) -> None:
    kind, settings = MODELS[name]
    with pytest.raises(InputError, match=message):
        CONVERTERS[kind].config({"model_type": kind, **settings, **changed})


@pytest.mark.parametrize("kind", MISSING)
def test_families_that_are_not_exact_are_refused_with_what_is_missing(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"holds a {kind} model, which needs layers") as caught:
        load_pretrained(tmp_path)
    assert MISSING[kind] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert kind not in CONVERTERS


def test_adapters_beside_a_model_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match="which would not be applied: merge them"):
        load_pretrained(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    weights = dict(Weights(tmp_path))
    for changed, message in [
        ({"model.norm.weight": None}, "lack 'model.norm.weight'"),
        ({"other": torch.ones(1)}, "hold 'other', for which the model has no place"),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(8, 32)},
            "'model.layers.0.self_attn.k_proj.weight' wants 16 rows, got 8",
        ),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(0, 32)},
            "'model.layers.0.self_attn.k_proj.weight' wants 16 rows, got 0",
        ),
        ({"model.norm.weight": torch.ones(5)}, "wants the shape .32,., got .5,."),
    ]:
        tensors = {n: t for n, t in {**weights, **changed}.items() if t is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match=message):
            load_pretrained(tmp_path)


def test_an_output_matrix_of_its_own_is_needed(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    found = read_pretrained(tmp_path)
    assert found.model.head is not None
    assert found.ignored == ()


def test_an_untied_head_in_a_tied_model_is_refused(tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    weights = dict(Weights(tmp_path)) | {"lm_head.weight": torch.ones(61, 32)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"set tie_word_embeddings .* to false"):
        load_pretrained(tmp_path)


def test_a_model_that_a_family_cannot_express_is_not_written(tmp_path: Path) -> None:
    layers: dict[str, Any] = {"attention": {"position": "rope", "qk_norm": True}}
    settings: dict[str, Any] = {
        "norm": "rms",
        "norm_eps": 1e-6,
        "feed_forward": "swiglu",
        "layers": layers,
    }
    model = LanguageModel(ModelConfig("attention*2", vocab_size=11, d_model=16, **settings))
    with pytest.raises(InputError, match=r"cannot express 'attention\*2': stack.layers.0.layer.k_"):
        write_pretrained(model, tmp_path / "out", "llama")
    with pytest.raises(InputError, match="have learned positions, got max_len=None"):
        write_pretrained(model, tmp_path / "out", "gpt2")
    lstm = LanguageModel(ModelConfig("lstm attention", vocab_size=11, d_model=16))
    with pytest.raises(InputError, match="consist of gated_conv or attention, each followed by"):
        write_pretrained(lstm, tmp_path / "out", "lfm2")
    with pytest.raises(InputError, match=r"consist of mamba2 in shared_transformer\(\.\.\.\) in"):
        write_pretrained(model, tmp_path / "out", "zamba2")
    with pytest.raises(InputError, match="followed by a channel_mixing, in value_residual"):
        write_pretrained(model, tmp_path / "out", "rwkv7")
    with pytest.raises(InputError, match="in normed blocks with norms"):
        write_pretrained(model, tmp_path / "out", "minimax")
    heads = "parallel(mamba2, attention, lstm)"
    hybrid = LanguageModel(ModelConfig(heads, vocab_size=11, d_model=16, **settings))
    with pytest.raises(InputError, match=r"consist of parallel\(mamba2, attention\), each"):
        write_pretrained(hybrid, tmp_path / "out", "falcon_h1")
    write_pretrained(model, tmp_path / "out", "qwen3")
    x = torch.arange(9)[None]
    assert_near(load_pretrained(tmp_path / "out")(x), model.eval()(x), 1e-6)


@pytest.mark.parametrize(
    ("name", "layer", "keyword", "value"),
    [
        ("llama", "attention", "score_scale", 0.5),
        ("llama", "attention", "soft_cap", 5.0),
        ("llama", "attention", "position", "alibi"),
        ("gpt2", "attention", "score_scale", 0.5),
        ("bamba", "mamba2", "min_step", 1e-3),
        ("falcon_h1", "mamba2", "min_step", 1e-3),
        ("mixtral", "moe", "activation", "geglu"),
        ("mixtral", "moe", "scale", 2.0),
    ],
)
def test_a_setting_that_a_family_has_no_field_for_is_refused_by_name(
    name: str, layer: str, keyword: str, value: Any, tmp_path: Path
) -> None:
    kind, settings = MODELS[name]
    own = next(c for c in CONVERTERS.values() if kind in c.kinds)
    config = own.config({"model_type": kind, **settings})
    layers = {**config.layers, layer: {**config.layers.get(layer, {}), keyword: value}}
    changed = LanguageModel(replace(config, layers=layers))
    with pytest.raises(InputError, match=rf"{keyword} would be .*, not {value}"):
        write_pretrained(changed, tmp_path / "out", kind)


@pytest.mark.parametrize(
    ("name", "model", "layers"),
    [
        ("recurrent_gemma", {"logits_soft_cap": 30}, {}),
        ("xlstm", {"logits_soft_cap": 30}, {"mlstm": {"expand_k": 1, "expand_v": 1}}),
        (
            "falcon_h1",
            {},
            {
                "mamba2": {"multipliers": "multipliers(u=1, out=1)"},
                "attention": {"out_scale": 1},
                "feed_forward": {"gate_scale": 1},
            },
        ),
        ("nemotron_h", {}, {"mamba2": {"min_step": 0}}),
    ],
)
def test_whole_numbers_are_written_as_transformers_accepts_them(
    name: str, model: dict[str, Any], layers: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    kind, settings = MODELS[name]
    own = next(c for c in CONVERTERS.values() if kind in c.kinds)
    config = own.config({"model_type": kind, **settings})
    own_layers = {kind: {**config.layers.get(kind, {}), **more} for kind, more in layers.items()}
    changed = replace(config, layers={**config.layers, **own_layers}, **model)
    ours = LanguageModel(changed).eval()
    write_pretrained(ours, tmp_path / "out", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_near(ours(tokens()), theirs(tokens()).logits, LIMITS.get(kind, 6e-6))


def test_settings_of_training_alone_do_not_hinder_writing(tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "hf")
    model = load_pretrained(tmp_path / "hf")
    layers = {name: dict(own) for name, own in model.config.layers.items()}
    layers["moe"]["balance"] = layers["moe"]["correction_rate"] = 0.1
    layers["attention"]["dropout"] = 0.1
    changed = LanguageModel(replace(model.config, layers=layers))
    changed.load_state_dict(model.state_dict())
    write_pretrained(changed, tmp_path / "out", "mixtral")
    assert_same_tensors(tmp_path / "out", tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_any_other_family_takes_a_model_or_refuses_it_in_one_line(name: str) -> None:
    kind, settings = MODELS[name]
    own = next(c for c in CONVERTERS.values() if kind in c.kinds)
    config = own.config({"model_type": kind, **settings})
    tensors = meta_model(config).state_dict()
    for other in (converter for converter in CONVERTERS.values() if converter.settings):
        try:
            other.write_settings(config)
            other.write(tensors, config)
        except InputError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1, lines


def test_norms_inside_mamba_are_refused_by_the_format_that_has_none(tmp_path: Path) -> None:
    saved("falcon_mamba", tmp_path / "hf")
    with pytest.raises(InputError, match="use the format mamba-hf"):
        write_pretrained(load_pretrained(tmp_path / "hf"), tmp_path / "out", "mamba")


def test_the_command_says_what_was_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("bamba", tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert 'recognised bamba: "mamba2 feed_forward attention"' in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "b"), "--to", "bamba"]) == 0
    assert_same_tensors(tmp_path / "b", tmp_path / "hf")


def test_the_tokens_that_begin_and_end_a_text_are_written_back(tmp_path: Path) -> None:
    def named(folder: str) -> tuple[Any, Any]:
        settings = json.loads((tmp_path / folder / "config.json").read_text())
        return settings["bos_token_id"], settings["eos_token_id"]

    saved("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [5, 7]}))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "again"), "--to", "llama"]) == 0
    assert named("again") == (1, [5, 7])
    # our own folder does not hold them, but its tokenizer does
    (tmp_path / "hf" / "generation_config.json").unlink()
    tiny_tokenizer(tmp_path / "hf")
    special = {"bos_token": "d", "eos_token": "f"}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(special))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "llama"]) == 0
    assert named("back") == (3, [5, 7])
    official = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert official.config.eos_token_id == [5, 7]


@pytest.mark.parametrize("name", ["gpt_neo", "llama", "lfm2", "granitemoehybrid", "falcon_mamba"])
def test_the_commands_work_on_a_converted_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(name, tmp_path / "hf")
    tiny_tokenizer(tmp_path / "hf")
    ours, text = str(tmp_path / "ours"), tmp_path / "text.txt"
    text.write_text("abcdefgh" * 8)
    assert main(["convert", str(tmp_path / "hf"), ours]) == 0
    assert "wrote tokenizer.json" in capsys.readouterr().out
    assert main(["generate", ours, "--prompt", "abc", "--max_new_tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("abc")
    assert main(["info", ours]) == 0
    assert "parameters" in capsys.readouterr().out
    assert main(["evaluate", ours, str(text)]) == 0
    assert "bits" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "hf"), "--prompt", "abc", "--max_new_tokens", "4"]) == 0


def test_the_law_of_a_converted_model_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("qwen3", tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert "the law holds" in capsys.readouterr().out


TRAIN = ["--task", "copying(max_len=5)", "--train.steps", "1", "--train.lr", "1e-9"]


@pytest.mark.slow
def test_training_starts_from_the_weights_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published folder, then a run of ours."""
    saved("qwen3", tmp_path / "hf")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert main(["train", str(tmp_path / "hf"), *TRAIN, "--out", one]) == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: copying(max_len=5)\ntrain:\n  steps: 1\n  lr: 1.0e-9\n")
    assert main(["train", str(recipe), "--init", one, "--out", two]) == 0
    none = str(tmp_path / "none")
    assert main(["train", str(recipe), "--init", none, "--out", str(tmp_path / "three")]) == 2
    assert "there is no such folder here" in capsys.readouterr().err
    x = tokens()
    wanted = load_pretrained(tmp_path / "hf")(x)
    assert_near(load_pretrained(one)(x), wanted, 1e-5)
    assert_near(load_pretrained(two)(x), wanted, 1e-5)
    capsys.readouterr()
    assert main(["train", str(tmp_path / "two" / "config.yaml"), "--print_config"]) == 0
    assert f"init: {one}" in capsys.readouterr().out


def test_training_from_a_folder_refuses_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("qwen3", tmp_path)
    out = ["--out", str(tmp_path / "out")]
    for options, message in [
        (
            ["--task", "copying(max_len=5)", "--model.norm", "layer"],
            "norm would be 'layer', but",
        ),
        (["--task", "text"], "the task has 256 tokens, but the model in"),
    ]:
        assert main(["train", str(tmp_path), *options, *out]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


ODD = [None, True, "x", "", -1, 0, 10**30, 0.5, 1e300, float("inf"), float("nan"), [1], {"a": 1}]


def build(kind: str, settings: dict[str, Any]) -> str:
    """Build a model without weights: what was wrong with the settings, or nothing."""
    try:
        config = CONVERTERS[kind].config(settings)
        if config.d_model < 1000 and config.vocab_size < 1000:
            meta_model(config)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "qwen2 with windows"])
@pytest.mark.usefixtures("unannotated")  # the reader must notice, not the checks of annotations
def test_damaged_settings_never_crash(name: str) -> None:
    """Each setting in turn is replaced by something odd: a model, or a line that explains."""
    kind, settings = MODELS[name]
    official = transformers.AutoConfig.for_model(kind, **settings).to_dict()
    for key in official.keys() - {"model_type"}:
        for value in ODD:
            assert "\n" not in build(kind, {**official, key: value})
