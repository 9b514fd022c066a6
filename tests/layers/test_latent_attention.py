"""Attention to latents, against its formula and DeepSeek's layer."""

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import LatentAttention


def test_latent_attention_is_that_of_deepseek() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = DeepseekV3Config(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=6,
        qk_rope_head_dim=2,
        qk_nope_head_dim=4,
        v_head_dim=4,
        head_dim=2,
        rope_interleave=False,
    )
    config._attn_implementation = "eager"
    official = theirs.DeepseekV3Attention(config, layer_idx=0).eval()
    torch.manual_seed(0)
    layer, x = LatentAttention(8, n_heads=2, d_latent=6, d_rotary=2), torch.randn(2, 9, 8)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.5 * torch.randn_like(weight))  # scores of a size that keeps 1e-5
    names = {
        "q_proj": layer.q_proj,
        "kv_a_proj_with_mqa": layer.down_proj,
        "kv_a_layernorm": layer.norm,
        "kv_b_proj": layer.up_proj,
        "o_proj": layer.out_proj,
    }
    official.load_state_dict({f"{name}.weight": part.weight for name, part in names.items()})
    places = theirs.DeepseekV3RotaryEmbedding(config)(x, torch.arange(9)[None])
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        wanted, _ = official(x, places, mask)
        torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)


def test_chunks_that_attend_to_latents_are_attention_to_keys_and_values() -> None:
    torch.manual_seed(0)
    layer = LatentAttention(8, n_heads=2, d_head=3, d_latent=5, d_rotary=4).double()
    x: Tensor = torch.randn(2, 9, 8, dtype=torch.float64)
    y, state = layer.forward_chunk(x, layer.init_state(2))
    torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-12)
    assert state.latent.shape == (2, 9, 9)
    assert layer.state_bytes(9) == 9 * 9 * 8 + 8


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="d_rotary must be even, for pairs are rotated, got 3"):
        LatentAttention(8, d_rotary=3)


def test_steps_see_what_a_hook_makes_of_keys_and_values() -> None:
    torch.manual_seed(0)
    layer, x = LatentAttention(8, n_heads=2), torch.randn(2, 9, 8)
    layer.up_proj.register_forward_hook(lambda _module, _inputs, y: y.tanh() + 1)
    y, state = layer.forward_chunk(x[:, :5], layer.init_state(2, capacity=4))
    with torch.no_grad():
        steps = [layer.step_(token, state) for token in x[:, 5:].unbind(1)]
        wanted = layer(x)
    torch.testing.assert_close(torch.cat([y, torch.stack(steps, 1)], 1), wanted)
