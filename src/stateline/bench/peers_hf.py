"""Layers of Hugging Face transformers, of the sizes that our layers have by default."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HEADS = 4


class _Cached(nn.Module):
    """A layer that keeps its state in a cache, which its method ``read`` is given.

    Args:
        layer: The layer.
        config: Its configuration, which says what a cache holds.
        named: How its ``forward`` calls the cache.
    """

    def __init__(self, layer: nn.Module, config: Any, named: str = "cache_params") -> None:
        super().__init__()
        self.layer, self.config, self.named = layer, config, named

    def new_cache(self) -> Any:
        """An empty cache."""
        return import_module("transformers").DynamicCache(config=self.config)

    def read(self, x: Tensor, cache: Any) -> Tensor:
        """The output, which also changes the cache."""
        y = self.layer(x, **({} if cache is None else {self.named: cache}))
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

    def __init__(self, layer: nn.Module, config: Any, rotary: nn.Module) -> None:
        super().__init__(layer, config, "past_key_values")
        config._attn_implementation = "sdpa"  # the layer reads keys and values by PyTorch's kernel
        self.rotary = rotary

    def read(self, x: Tensor, cache: Any) -> Tensor:
        """The output; without a mask, rows of several positions are causal."""
        before = 0 if cache is None else cache.get_seq_length()
        places = torch.arange(before, before + x.shape[1], device=x.device)[None]
        y: Tensor = self.layer(x, self.rotary(x, places), None, past_key_values=cache)[0]
        return y


class _Lightning(_Cached):
    """MiniMax's layer, whose cache is of its own kind."""

    def new_cache(self) -> Any:
        return import_module("transformers.models.minimax.modeling_minimax").MiniMaxCache()

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


def _module(family: str) -> Any:
    return import_module(f"transformers.models.{family}.modeling_{family}")


def _config(family: str, kind: str, **settings: Any) -> Any:
    """A configuration of one layer."""
    module = import_module(f"transformers.models.{family}.configuration_{family}")
    return getattr(module, f"{kind}Config")(vocab_size=8, num_hidden_layers=1, **settings)


def _layer(family: str, kind: str, layer: str, config: Any, *places: int) -> nn.Module:
    """One layer with initial weights, some of which only its model sets."""
    module = _module(family)
    made: nn.Module = getattr(module, layer)(config, *places)
    return made.apply(getattr(module, f"{kind}PreTrainedModel")(config)._init_weights)


def _mamba2(_: str, d_model: int) -> nn.Module:
    sizes = {"num_heads": 2 * d_model // 64, "head_dim": 64, "state_size": 128, "n_groups": 1}
    config = _config("mamba2", "Mamba2", hidden_size=d_model, **sizes)
    return _Cached(_layer("mamba2", "Mamba2", "Mamba2Mixer", config, 0), config)


def _gated_delta_net(_: str, d_model: int) -> nn.Module:
    config = _config(
        "qwen3_next",
        "Qwen3Next",
        hidden_size=d_model,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=d_model // HEADS,
        linear_value_head_dim=2 * d_model // HEADS,
        layer_types=["linear_attention"],
    )
    return _Cached(_layer("qwen3_next", "Qwen3Next", "Qwen3NextGatedDeltaNet", config, 0), config)


def _gated_attention(_: str, d_model: int) -> nn.Module:
    config = _config(
        "qwen3_next",
        "Qwen3Next",
        hidden_size=d_model,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=d_model // HEADS,
        partial_rotary_factor=1.0,
        layer_types=["full_attention"],
    )
    layer = _layer("qwen3_next", "Qwen3Next", "Qwen3NextAttention", config, 0)
    return _Attention(layer, config, _module("qwen3_next").Qwen3NextRotaryEmbedding(config))


def _kimi_delta_attention(_: str, d_model: int) -> nn.Module:
    config = _config(
        "kimi_linear",
        "KimiLinear",
        hidden_size=d_model,
        linear_head_dim=d_model // HEADS,
        linear_num_heads=HEADS,
        layer_types=["linear_attention"],
    )
    return _Cached(
        _layer("kimi_linear", "KimiLinear", "KimiLinearDeltaAttention", config, 0), config
    )


def _latent_attention(_: str, d_model: int) -> nn.Module:
    width = d_model // HEADS
    config = _config(
        "deepseek_v3",
        "DeepseekV3",
        hidden_size=d_model,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=2 * width,
        qk_rope_head_dim=2 * -(-width // 4),
        qk_nope_head_dim=width,
        v_head_dim=width,
        rope_interleave=False,
    )
    layer = _layer("deepseek_v3", "DeepseekV3", "DeepseekV3Attention", config, 0)
    return _Attention(layer, config, _module("deepseek_v3").DeepseekV3RotaryEmbedding(config))


def _lightning_attention(_: str, d_model: int) -> nn.Module:
    config = _config(
        "minimax",
        "MiniMax",
        hidden_size=d_model,
        num_attention_heads=HEADS,
        head_dim=d_model // HEADS,
        layer_types=["linear_attention"],
    )
    return _Lightning(_layer("minimax", "MiniMax", "MiniMaxLightningAttention", config, 0), config)


def _mlstm(_: str, d_model: int) -> nn.Module:
    # The kernel for chunks reads whole ones alone; PyTorch's is the one for a CPU.
    config = _config(
        "xlstm",
        "xLSTM",
        hidden_size=d_model,
        num_heads=HEADS,
        chunkwise_kernel="chunkwise--native_autograd",
        mode="inference",
    )
    return _XLSTM(_layer("xlstm", "xLSTM", "xLSTMLayer", config), config)


LAYERS: Mapping[str, Callable[[str, int], nn.Module]] = {
    "attention": _gated_attention,
    "gated_delta_net": _gated_delta_net,
    "kimi_delta_attention": _kimi_delta_attention,
    "latent_attention": _latent_attention,
    "lightning_attention": _lightning_attention,
    "mamba2": _mamba2,
    "mlstm": _mlstm,
}
"""By the name of ours. Without its kernels, a backward pass of Mamba takes minutes.

``attention`` is Qwen3-Next's: ``attention(gated=true, position=rope, qk_norm=offset)``.
"""


def hugging_face(_: Path | None) -> Mapping[str, Callable[[str, int], nn.Module]]:
    """The layers, if transformers is installed."""
    import_module("transformers")
    return LAYERS
