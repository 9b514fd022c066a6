"""Layers and a model of Hugging Face transformers, in the sizes that ours have by default."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HEADS = 4

MAMBA_LAYERS = 24
"""As in Mamba-130M; 12 layers with feed-forwards have about the same number of parameters."""

MOST_BYTES = 4 << 30
"""Mamba skips a prompt that needs more memory."""


class _Cached(nn.Module):
    """A layer that keeps its state in a cache; its configuration says what the cache holds."""

    def __init__(self, layer: nn.Module, config: Any, code: Any) -> None:
        super().__init__()
        self.layer, self.config, self.code = layer, config, code

    def new_cache(self) -> Any:
        """An empty cache."""
        return import_module("transformers").DynamicCache(config=self.config)

    def read(self, x: Tensor, cache: Any) -> Tensor:
        """The output, which also changes the cache."""
        y = self.layer(x, **({} if cache is None else {"cache_params": cache}))
        return y[0] if isinstance(y, tuple) else y

    def forward(self, x: Tensor) -> Tensor:
        """The output for whole rows."""
        return self.read(x, None)

    def prefill(self, x: Tensor) -> Any:
        """Read a prompt, and return the state."""
        cache = self.new_cache()
        self.read(x, cache)
        return cache

    def step(self, x: Tensor, state: Any) -> object:
        """Read one more position (batch, 1, channel)."""
        return self.read(x, state)


class _Attention(_Cached):
    """Attention that gets rotations, and a cache of keys and values."""

    def __init__(self, layer: nn.Module, config: Any, code: Any) -> None:
        super().__init__(layer, config, code)
        config._attn_implementation = "sdpa"  # the layer reads keys and values by PyTorch's kernel
        rotary = type(config).__name__.replace("Config", "RotaryEmbedding")
        self.rotary = getattr(code, rotary)(config)

    def read(self, x: Tensor, cache: Any) -> Tensor:
        """The output; without a mask, rows of several positions are causal."""
        before = 0 if cache is None else cache.get_seq_length()
        places = torch.arange(before, before + x.shape[1], device=x.device)[None]
        y: Tensor = self.layer(x, self.rotary(x, places), None, past_key_values=cache)[0]
        return y


class _Lightning(_Cached):
    """MiniMax's layer, whose cache is of its own kind."""

    def new_cache(self) -> Any:
        return self.code.MiniMaxCache()

    def read(self, x: Tensor, cache: Any) -> Tensor:
        y: Tensor = self.layer(x, None, None, past_key_values=cache)[0]
        return y


class _XLSTM(_Cached):
    """The mLSTM of xLSTM, whose state is a tuple; a list of one holds it."""

    def new_cache(self) -> list[Any]:
        return [None]

    def read(self, x: Tensor, cache: list[Any] | None) -> Tensor:
        y, after = self.layer(x, None if cache is None else cache[0])
        if cache is not None:
            cache[0] = after
        return y


def _builder(
    family: str,
    kind: str,
    layer: str,
    settings: Callable[[int], dict[str, Any]],
    wrap: type[_Cached] = _Cached,
) -> Callable[[str, int], nn.Module | None]:
    """A function that builds a layer.

    Args:
        family: Its folder in transformers.
        kind: Prefix of the names of its classes.
        layer: Name of the layer's class, without the prefix.
        settings: Settings of its configuration, from the width of a head.
        wrap: Class that calls the layer.
    """

    def build(pattern: str, d_model: int) -> nn.Module | None:
        if "n_products" in pattern:
            return None  # no layer of transformers has several keys per token
        home = f"transformers.models.{family}"
        code = import_module(f"{home}.modeling_{family}")
        config = getattr(import_module(f"{home}.configuration_{family}"), f"{kind}Config")(
            vocab_size=8, num_hidden_layers=1, hidden_size=d_model, **settings(d_model // HEADS)
        )
        made = getattr(code, kind + layer)(config, *([] if kind == "xLSTM" else [0]))
        made.apply(getattr(code, f"{kind}PreTrainedModel")(config)._init_weights)
        return wrap(made, config, code)

    return build


_FULL, _LINEAR = ["full_attention"], ["linear_attention"]
_HEADS = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}

LAYERS: Mapping[str, Callable[[str, int], nn.Module | None]] = {
    "attention": _builder(
        "qwen3_next",
        "Qwen3Next",
        "Attention",
        lambda d: {**_HEADS, "head_dim": d, "partial_rotary_factor": 1.0, "layer_types": _FULL},
        _Attention,
    ),
    "gated_delta_net": _builder(
        "qwen3_next",
        "Qwen3Next",
        "GatedDeltaNet",
        lambda d: {
            "linear_num_key_heads": HEADS,
            "linear_num_value_heads": HEADS,
            "linear_key_head_dim": d,
            "linear_value_head_dim": 2 * d,
            "layer_types": _LINEAR,
        },
    ),
    "kimi_delta_attention": _builder(
        "kimi_linear",
        "KimiLinear",
        "DeltaAttention",
        lambda d: {"linear_head_dim": d, "linear_num_heads": HEADS, "layer_types": _LINEAR},
    ),
    "latent_attention": _builder(
        "deepseek_v3",
        "DeepseekV3",
        "Attention",
        lambda d: {
            **_HEADS,
            "q_lora_rank": None,
            "kv_lora_rank": 2 * d,
            "qk_rope_head_dim": 2 * -(-d // 4),
            "qk_nope_head_dim": d,
            "v_head_dim": d,
            "rope_interleave": False,
        },
        _Attention,
    ),
    "lightning_attention": _builder(
        "minimax",
        "MiniMax",
        "LightningAttention",
        lambda d: {"num_attention_heads": HEADS, "head_dim": d, "layer_types": _LINEAR},
        _Lightning,
    ),
    "mamba2": _builder(
        "mamba2",
        "Mamba2",
        "Mixer",
        lambda d: {"num_heads": d // 8, "head_dim": 64, "state_size": 128, "n_groups": 1},
    ),
    # PyTorch's kernel runs on a CPU; it takes whole chunks only.
    "mlstm": _builder(
        "xlstm",
        "xLSTM",
        "Layer",
        lambda _: {
            "num_heads": HEADS,
            "chunkwise_kernel": "chunkwise--native_autograd",
            "mode": "inference",
        },
        _XLSTM,
    ),
}
"""By the name of our layer. Without its kernels, a backward pass of Mamba takes minutes.

``attention`` is Qwen3-Next's: ``attention(gated=true, position=rope, qk_norm=offset)``.
"""


def hugging_face(_: Path | None) -> Mapping[str, Callable[[str, int], nn.Module | None]]:
    """The layers, if transformers is installed."""
    import_module("transformers")
    return LAYERS


class Mamba:
    """A language model with random weights: Mamba without its own kernels."""

    title = f"hf mamba*{MAMBA_LAYERS}"

    def __init__(self, d_model: int, vocab_size: int, place: torch.device) -> None:
        mamba = import_module("transformers.models.mamba")
        config = mamba.MambaConfig(
            vocab_size=vocab_size, hidden_size=d_model, num_hidden_layers=MAMBA_LAYERS
        )
        torch.manual_seed(0)
        self.model = mamba.MambaForCausalLM(config).eval().to(place)
        self.vocab_size, self.width = vocab_size, config.intermediate_size * config.state_size

    def too_large(self, batch: int, prompt: int) -> str:
        """Why a prompt is too large: the scan stores state, transition and input of each token."""
        needed = 3 * 4 * batch * prompt * self.width
        return f"it would need {needed >> 30} GiB" if needed > MOST_BYTES else ""

    def prefill(self, tokens: Tensor) -> Any:
        """Read a prompt (batch, length), and return the state."""
        return self.model(tokens, use_cache=True, logits_to_keep=1).cache_params

    def step(self, tokens: Tensor, state: Any) -> object:
        """Read one more token (batch, 1), and change the state."""
        return self.model(tokens, cache_params=state, use_cache=True)
