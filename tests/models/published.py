"""Tiny models of every published format, and comparisons with them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stateline.models.config import ModelConfig
from stateline.models.convert.table import CONVERTERS, write_pretrained
from stateline.models.convert.weights import Weights
from stateline.models.language_model import LanguageModel
from tests.models.test_transformer_sequential import SETTINGS as STAIRCASE
from tests.models.test_transformer_sequential import official as staircase_tensors

transformers = pytest.importorskip("transformers", reason="models are made by transformers")

GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
NEO = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 5,
    "max_position_embeddings": 48,
}
OPT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.03,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}
GRANITE4 = {
    **BASE,
    **MAMBA2,
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"],
}
JAMBA = {
    **BASE,
    "num_hidden_layers": 4,
    "num_experts": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 3,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
QWEN = {
    **BASE,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
MINIMAX = {
    "num_local_experts": 4,
    **{f"{place}_alpha_factor": 3.5 for place in ("full_attn", "linear_attn", "mlp")},
    **{f"{place}_beta_factor": 0.5 for place in ("full_attn", "linear_attn", "mlp")},
}
KIMI = {
    **BASE,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "qk_rope_head_dim": 6,
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
}
FALCON_H1 = {
    **BASE,
    **MAMBA2,
    "mamba_n_heads": 6,
    "mamba_d_ssm": 48,
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.07,
    "mlp_multipliers": [0.9, 0.6],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.94,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.7, 1.3, 0.9, 0.5, 1.2],
    "ssm_out_multiplier": 0.4,
}
ZAMBA2 = {
    **BASE,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "layers_block_type": [*["linear_attention", "hybrid"] * 2, "hybrid", "linear_attention"],
    "num_mem_blocks": 2,
    "use_shared_attention_adapter": True,
    "adapter_rank": 4,
    "use_mem_rope": True,
    "n_mamba_heads": 8,
    "mamba_d_state": 8,
    "chunk_size": 8,
}
GEMMA = {
    **BASE,
    "num_hidden_layers": 3,
    "num_key_value_heads": None,
    "attention_window_size": 6,
    "lru_width": 32,
}
GEMMA3 = {
    **BASE,
    "head_dim": 12,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
}
GEMMA2 = {**BASE, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20}
MAMBA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "tie_word_embeddings": False,
}
NEMOTRON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "full_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ssm_state_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT),
    "gpt2 unscaled": ("gpt2", {**GPT, "scale_attn_weights": False, "n_inner": 40}),
    "gpt_neo": ("gpt_neo", NEO),
    "opt": ("opt", OPT),
    "opt without biases": ("opt", {**OPT, "enable_bias": False}),
    "llama": ("llama", BASE),
    "llama 3 with biases": (
        "llama",
        {
            **BASE,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama stretched": (
        "llama",
        {**BASE, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama with yarn": (
        "llama",
        {
            **BASE,
            "head_dim": 16,
            "rope_parameters": {**YARN, "mscale": 3.0, "mscale_all_dim": 1.0, "truncate": False},
        },
    ),
    "qwen2 with yarn and windows": (
        "qwen2",
        {
            **BASE,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "rope_parameters": YARN,
        },
    ),
    "mistral": ("mistral", {**BASE, "sliding_window": 6}),
    "mistral without window": ("mistral", {**BASE, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {**BASE, "tie_word_embeddings": True}),
    "qwen2 with windows": (
        "qwen2",
        {**BASE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**BASE, "head_dim": 16}),
    "granite": ("granite", {**BASE, **MULTIPLIERS}),
    "bamba": ("bamba", {**BASE, **MAMBA2, "attn_layer_indices": [1]}),
    "bamba without bias": (
        "bamba",
        {**BASE, **MAMBA2, "attn_layer_indices": [1], "mamba_conv_bias": False},
    ),
    "granitemoehybrid": ("granitemoehybrid", {**GRANITE4, **MULTIPLIERS}),
    "granitemoehybrid with rope": (
        "granitemoehybrid",
        {**GRANITE4, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "granitemoehybrid with experts": (
        "granitemoehybrid",
        {
            **GRANITE4,
            **MULTIPLIERS,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
        },
    ),
    "jamba": ("jamba", JAMBA),
    "jamba with experts": (
        "jamba",
        {**JAMBA, "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 0},
    ),
    "jamba with biases": (
        "jamba",
        {**JAMBA, "mamba_conv_bias": False, "mamba_proj_bias": True, "attn_layer_offset": 0},
    ),
    "lfm2": ("lfm2", {**BASE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "lfm2 with biases": (
        "lfm2",
        {
            **BASE,
            "layer_types": ["conv", "full_attention"],
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **BASE,
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"] * 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2_moe without bias of experts": (
        "lfm2_moe",
        {
            **BASE,
            **EXPERTS,
            "num_dense_layers": 0,
            "layer_types": ["full_attention", "conv"],
            "use_expert_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "minimax": ("minimax", {**BASE, **MINIMAX}),
    "minimax with other heads": (
        "minimax",
        {
            **BASE,
            **MINIMAX,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {**BASE, "num_hidden_layers": 4, "linear_value_head_dim": 6},
    ),
    "olmo_hybrid without positions": (
        "olmo_hybrid",
        {
            **BASE,
            "layer_types": ["full_attention", "linear_attention"],
            "attention_bias": True,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 4,  # 4 heads of values: as wide as 2 of keys
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        },
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h with biases": (
        "nemotron_h",
        {**NEMOTRON, "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "head_dim": 16},
    ),
    "nemotron_h with experts": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen3_next": ("qwen3_next", {**QWEN, "num_experts": 0}),
    "qwen3_next with experts": ("qwen3_next", {**QWEN, **SHARED}),
    "qwen3_next with experts in one layer": (
        "qwen3_next",
        {**QWEN, **SHARED, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3_next with few dense layers": (
        "qwen3_next",
        {
            **QWEN,
            "num_hidden_layers": 5,
            "layer_types": None,
            "mlp_only_layers": [0, 1, 2, 3, 4],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {**BASE, "num_local_experts": 4}),
    "mixtral with windows": ("mixtral", {**BASE, "num_local_experts": 4, "sliding_window": 6}),
    "qwen2_moe": ("qwen2_moe", {**BASE, **SHARED}),
    "qwen3_moe": ("qwen3_moe", {**BASE, **EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {**BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", {**BASE, **MULTIPLIERS, "num_local_experts": 4}),
    "kimi_linear": ("kimi_linear", KIMI),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**{name: v for name, v in QWEN.items() if name != "intermediate_size"}, **SHARED},
    ),
    "xlstm": (
        "xlstm",
        {"vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4},
    ),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1 with norms": (
        "falcon_h1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "zamba2": ("zamba2", ZAMBA2),
    "zamba2 with three transformers": (
        "zamba2",
        {
            **ZAMBA2,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid", "hybrid"],
            "num_hidden_layers": 5,
            "num_mem_blocks": 3,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "add_bias_linear": True,
            "mamba_ngroups": 2,
        },
    ),
    "qwen3_5_text": ("qwen3_5_text", QWEN),
    "qwen3_5_text with other heads": (
        "qwen3_5_text",
        {
            **QWEN,
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 3,
            "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 100.0},
        },
    ),
    "recurrent_gemma": ("recurrent_gemma", GEMMA),
    "recurrent_gemma with grouped queries": (
        "recurrent_gemma",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "block_types": ["attention", "recurrent"],
            "conv1d_width": 3,
            "lru_width": 48,
            "logits_soft_cap": 2.0,
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "num_attention_heads": 4,
        },
    ),
    "olmo2": ("olmo2", {**BASE, "attention_bias": True, "rope_parameters": LLAMA3}),
    "exaone4": (
        "exaone4",
        {**BASE, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone4 without windows": (
        "exaone4",
        {**BASE, "sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 12},
    ),
    "gemma": ("gemma", {**BASE, "head_dim": 12}),
    "gemma2": (
        "gemma2",
        {**GEMMA2, "attn_logit_softcapping": 0.1, "final_logit_softcapping": 0.4},
    ),
    "gemma2 without caps": (
        "gemma2",
        {
            **GEMMA2,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "gemma3_text with caps and stretched positions": (
        "gemma3_text",
        {
            **GEMMA3,
            "num_hidden_layers": 7,
            "layer_types": None,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "qwen3 with windows": (
        "qwen3",
        {**BASE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "mamba": ("mamba", {**MAMBA, "tie_word_embeddings": True}),
    "mamba2": ("mamba2", {**MAMBA, "head_dim": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8}),
    "falcon_mamba": ("falcon_mamba", {**MAMBA, "state_size": 4, "mixer_rms_eps": 1e-3}),
}


def official_model(name: str, **changes: Any) -> Any:
    """A tiny random model, in which every tensor matters."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            noise = torch.randn_like(parameter)
            parameter.mul_(3) if parameter.dim() == 2 else parameter.add_(noise, alpha=0.1)
            if name.endswith("dt_bias"):
                parameter[0] = -8.0  # smaller steps than Nemotron-H's smallest
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn_like(buffer))
    return model


def saved(name: str, folder: Path, **options: Any) -> Any:
    model = official_model(name)
    model.save_pretrained(folder, **options)
    return model


def tokens(batch: int = 2, length: int = 24) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 61, (batch, length))


LIMITS = {"qwen3_next": 1e-5, "recurrent_gemma": 3e-5, "olmo_hybrid": 2e-5}
"""Largest relative differences; those of other families are up to 6e-7, of the first two 9e-7 and
3e-6. Both float32 readings of the last are up to 4.4e-6 from float64, on a processor with AVX2."""


def tiny_tokenizer(folder: Path) -> None:
    """A tokenizer of Hugging Face that knows 61 letters."""
    tokenizers = pytest.importorskip("tokenizers", reason="makes the tokenizer")
    vocabulary = {letter: number for number, letter in enumerate(ascii_letters + "_.,:;!?-+")}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="_")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    # Not those of the model's family: the class of Qwen adds a token for each that is not named.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict.fromkeys(
        ("unk_token", "eos_token", "pad_token"), "_"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def assert_near(found: Tensor, wanted: Tensor, limit: float = 6e-6) -> None:
    found, wanted = found.detach(), wanted.detach()
    assert float((found - wanted).abs().max()) <= limit * float(wanted.abs().max())


def assert_same_tensors(one: Path, other: Path) -> None:
    found, wanted = Weights(one), Weights(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name.endswith("embed_positions.weight"):  # OPT never reads the first two rows
            tensor = torch.cat([torch.zeros_like(tensor[:2]), tensor[2:]])
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name


def _ours(to: str, pattern: str, **settings: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        config = ModelConfig(pattern, **{"vocab_size": 61, "d_model": 32, **settings})
        write_pretrained(LanguageModel(config), folder, to)

    return write


def _staircase(folder: Path) -> None:
    torch.manual_seed(0)
    folder.mkdir()
    sizes = {"in_emb.weight": (61, 8), "out.out_emb.weight": (61, 8), "out.out_emb.bias": (61,)}
    tensors = staircase_tensors() | {name: torch.randn(size) for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**STAIRCASE, "vocab_sz": 61}))


_LSTM = {"block": "plain", "norm": "none", "tie_embeddings": False, "head_bias": True}
_HARD = {"n_heads": 4, "bias": True, "position": "hard_alibi"}
_NEOX = {"block": "parallel", "tie_embeddings": False, "layers": {"attention": _HARD}}

RWKV7 = "value_residual((rwkv7(rank=3) channel_mixing(d_hidden=40))*3, rank=2)"
RWKV7_SETTINGS = {
    "norm": "layer",
    "feed_forward": "none",
    "embedding_norm": True,
    "tie_embeddings": False,
}

FAMILIES = [name for name in CONVERTERS if name in MODELS and name not in ("mamba", "gpt_neox")]
"""Formats that are named by their ``model_type``."""

FOLDERS: dict[str, Callable[[Path], Any]] = {
    "h3": _ours("h3", "h3 attention", layers={"attention": {"bias": True}}),
    "mamba": _ours("mamba", "mamba*2", norm="rms"),
    "repeat_after_me": _ours("repeat_after_me", "attention*2", **_NEOX),
    "repeat_after_me_lstm": _ours("repeat_after_me_lstm", "lstm(n_layers=2)", **_LSTM),
    "transformer_sequential": _staircase,
    "gpt_neox": partial(saved, "gpt_neox"),
    "rwkv7": _ours("rwkv7", RWKV7, **RWKV7_SETTINGS),
    "mamba-hf": partial(saved, "mamba2"),
    **{kind: partial(saved, kind) for kind in FAMILIES},
}
"""Writes a tiny model of each format into a folder."""
