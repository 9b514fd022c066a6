"""The tensors of each layer of a model, by our names and the official names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.layers.mixers.rwkv7 import MIXED
from stateline.models.config import ModelConfig
from stateline.models.convert.parts import (
    KERNEL,
    SAME,
    Change,
    Names,
    Part,
    Place,
    by_head,
    groups,
    unwrapped,
)


def decoder_parts(
    config: ModelConfig, names: Names, inside: Callable[[int], str] = lambda _: ""
) -> list[Part]:
    """All tensors of a model, besides those of a wrapper around all layers.

    Args:
        config: Configuration of the model.
        names: Names of the format.
        inside: What follows ``names.layer`` in the names of a block, by its number.

    Raises:
        InputError: If the model has layers that the format does not know.
    """
    ends = ".*" if config.norm == "layer" else ".weight"
    parts = Place().same(f"embedding.weight:{names.embedding}.weight norm{ends}:{names.norm}{ends}")
    if config.embedding_norm and names.embedding_norm:
        parts += Place().same(f"embedding_norm{ends}:{names.embedding_norm}{ends}")
    if config.max_len and names.positions:
        n = names.unused_positions
        skip = Change(lambda t: t[n:], lambda t: F.pad(t, (0, 0, n, 0)))
        parts += Place().same(f"positions.weight:{names.positions}.weight", skip)
    if not config.tie_embeddings:
        parts += Place().same(f"head.weight:{names.head}.weight")
    for number, block in enumerate(groups(config, names).blocks):
        there = names.layer.format(number) + inside(number)
        norms = names.norms_after if block[0].name in config.norm_after.split() else names.norms
        for norm, layer in zip(norms, block, strict=True):
            branch = Place(there, layer.path.removesuffix("layer."))
            parts += branch.same(f"norm{ends}:{norm}{ends}")
            if config.block == "sandwich":
                after = names.norms_after[names.norms.index(norm)]
                parts += branch.same(f"after{ends}:{after}{ends}")
            for one in unwrapped([layer]):
                inner = "" if one.name in _OUTSIDE else names.inner
                parts += _MAKE[one.name](Place(there + inner, one.path, one.keywords, names))
    return parts


def _attention(at: Place) -> list[Part]:
    own, bias = at.keywords, at.keywords["bias"]
    rows = [own[n] * own["d_head"] for n in ("n_heads", "n_kv_heads", "n_kv_heads")]
    rows[0] *= 1 + own["gated"]
    change = by_head(own["n_heads"], [own["d_head"]] * 3) if at.names.by_head else SAME
    parts = at.linear("qkv", at.names.qkv, bias in (True, "qkv"), rows, change)
    parts += at.linear("out_proj", [at.names.out], bias in (True, "out"))
    return parts + (_qk_norms(at) if own["qk_norm"] else [])


def _sliding_attention(at: Place) -> list[Part]:
    bias, (q, *kv) = at.keywords["bias"], at.names.qkv
    rows = [at.keywords["n_kv_heads"] * at.keywords["d_head"]] * 2
    parts = at.linear("q_proj", [q], bias in (True, "qkv"))
    parts += at.linear("kv_proj", kv, bias in (True, "qkv"), rows)
    parts += at.linear("out_proj", [at.names.out], bias in (True, "out"))
    return parts + (_qk_norms(at) if not isinstance(at.keywords["qk_norm"], bool) else [])


def _qk_norms(at: Place) -> list[Part]:
    q, k = at.names.qk_norms
    return at.same(f"q_norm.weight:{q}.weight k_norm.weight:{k}.weight")


def _mamba(at: Place) -> list[Part]:
    own = at.keywords
    parts = at.same(
        "a_log:A_log skip:D dt_weight:dt_proj.weight dt_bias:dt_proj.bias x_proj.weight"
    )
    if own["learned_norms"]:
        norms = [f"{name}_layernorm.weight" for name in ("dt", "b", "c")]
        parts.append(at.part("norm_weight", norms, (own["dt_rank"], *[own["d_state"]] * 2)))
    return parts + at.kernel("conv1d", own["conv_bias"]) + at.ends()


def _mamba2(at: Place) -> list[Part]:
    norm = " norm_weight:norm.weight" if at.keywords["normalise"] else ""
    parts = at.same(f"a_log:A_log skip:D dt_bias{norm}")
    return parts + at.kernel("conv1d", at.keywords["conv_bias"]) + at.ends()


def _gated_conv(at: Place) -> list[Part]:
    return at.kernel("conv", at.keywords["bias"]) + at.ends()


def _gated_delta_net(at: Place) -> list[Part]:
    n_heads, n_key_heads, d_key = (at.keywords[n] for n in ("n_heads", "n_key_heads", "d_key"))
    d_value = round(at.keywords["expand_v"] * d_key)
    keys, values = n_key_heads * d_key, n_heads * d_value
    inputs = [f"{name}.weight" for name in at.names.delta]
    rows: tuple[int, ...] = (2 * keys + values, values, n_heads, n_heads)
    changes: tuple[Change, ...] = (SAME,)
    ends, kernels = ("norm", "out_proj"), at.kernel("conv1d")
    if len(inputs) == 6:
        rows, ends = (keys, keys, values, values, n_heads, n_heads), ("o_norm", "o_proj")
        # transformers writes equal thirds, whatever the sizes are
        kernels = [_three_kernels(at, (keys, keys, values))._replace(anywhere=True)]
    if len(inputs) == 2:
        rows, shared = (2 * (keys + values), 2 * n_heads), n_heads // n_key_heads
        each = [d_key, d_key, shared * d_value, shared * d_value]
        changes = (by_head(n_key_heads, each), by_head(n_key_heads, [shared] * 2, -1))
    parts = [at.part("in_proj.weight", inputs, rows, changes=changes), *kernels]
    norm, out = ends
    return parts + at.same(
        f"a_log:A_log dt_bias norm.weight:{norm}.weight out_proj.weight:{out}.weight"
    )


def _three_kernels(at: Place, rows: tuple[int, ...]) -> Part:
    """The filters of queries, keys and values."""
    kernels = [f"{name}_conv1d.weight" for name in "qkv"]
    return at.part("conv.kernel", kernels, rows, changes=(KERNEL,))


def _rg_lru(at: Place) -> list[Part]:
    parts = at.linear("in_proj", ["linear_y", "linear_x"], True, [at.keywords["d_inner"]] * 2)
    parts += at.linear("out_proj", ["linear_out"], True)
    gates = " ".join(
        f"{ours}_{end}:rg_lru.{official}_gate_{end}"
        for ours, official in (("decay", "recurrent"), ("input", "input"))
        for end in ("weight", "bias")
    )
    parts += at.same(f"rate:rg_lru.recurrent_param {gates}")
    return parts + at.kernel("conv_1d", bias=True)


def h3_parts(at: Place) -> list[Part]:
    """The tensors of an H3 layer."""
    width = at.keywords["d_model"]
    parts = at.linear("qkv", [f"{name}_proj" for name in "qkv"], True, [width] * 3)
    parts += at.linear("out_proj", ["output_linear"], True)
    for ours, official, rows in (
        ("shift", "ssm_k_kernel.kernel", width),
        ("diagonal", "kernel.kernel", width // at.keywords["d_head"]),
    ):
        parts += at.same(f"{ours}.c:{official}.C", _outputs_first(rows))
    return parts + at.same(
        "shift.b:ssm_k_kernel.kernel.B shift.skip:ssm_k_D diagonal.skip:D "
        "diagonal.log_dt:kernel.kernel.log_dt diagonal.log_decay:kernel.kernel.inv_A_real "
        "diagonal.frequency:kernel.kernel.A_imag diagonal.b:kernel.kernel.B"
    )


def _outputs_first(rows: int) -> Change:
    """Official readouts have an axis for the outputs of each channel; ours joins them."""
    return Change(lambda t: t.flatten(0, 1), lambda t: t.unflatten(0, (-1, rows)))


def _feed_forward(at: Place) -> list[Part]:
    bias = at.keywords["bias"]
    parts = at.linear("in_proj", at.names.up, bias, [at.keywords["d_hidden"]] * 2)
    return parts + at.linear("out_proj", [at.names.down], bias)


def _kimi_delta_attention(at: Place) -> list[Part]:
    n_heads, rank = at.keywords["n_heads"], at.keywords["rank"]
    inner = n_heads * at.keywords["d_head"]
    maps = ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_a_proj")
    rows = (inner, inner, inner, rank, n_heads, rank)
    flat = Change(lambda t: t.flatten(), lambda t: t.view(1, 1, n_heads, 1))
    return [
        at.part("in_proj.weight", [f"{name}.weight" for name in maps], rows),
        _three_kernels(at, (inner,) * 3),
        *at.same("a_log:A_log", flat),
        *at.same("dt_bias norm.weight:o_norm.weight decay_proj.weight:f_b_proj.weight"),
        *at.same("gate_proj.weight:g_b_proj.weight out_proj.weight:o_proj.weight"),
    ]


def _mlstm(at: Place) -> list[Part]:
    n_heads, width = at.keywords["n_heads"], at.keywords["d_model"]
    keys, values = (round(at.keywords[n] * width) for n in ("expand_k", "expand_v"))
    gates = ("igate_preact", "fgate_preact")
    maps = [f"{name}.weight" for name in ("q", "k", "v", "ogate_preact", *gates)]
    heads = Change(lambda t: t.unflatten(0, (n_heads, -1)), lambda t: t.flatten())
    return [
        at.part("in_proj.weight", maps, (keys, keys, values, values, n_heads, n_heads)),
        at.part("gate_bias", [f"{name}.bias" for name in gates], (n_heads,) * 2),
        *at.same("norm_weight:multihead_norm.weight", heads),
        *at.same("out_proj.weight"),
    ]


def _lightning_attention(at: Place) -> list[Part]:
    return at.same(
        "qkv.weight:qkv_proj.weight gate_proj.weight:output_gate.weight norm.weight out_proj.weight"
    ) + [
        Part("", (at.there + name,), constant=partial(_lightning, name, at.keywords))
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    ]


_BLOCK = 256
"""Tokens for which files hold decays; transformers' default."""


def _lightning(name: str, keywords: Mapping[str, Any]) -> Tensor:
    """A constant: rates of the heads, or decays inside a block of tokens."""
    n_heads = keywords["n_heads"]
    rates = (1 / 2 ** (8 / n_heads)) ** (torch.arange(n_heads) + 1) * keywords["decay_scale"]
    rates, places = rates[:, None, None], torch.arange(_BLOCK) + 1
    if name == "slope_rate":
        return rates
    if name == "query_decay":
        return torch.exp(-rates * places[:, None])
    if name == "key_decay":
        return torch.exp(-rates * (_BLOCK - places[:, None]))
    distance = (rates * (places[:, None] - places))[None]
    return torch.exp(-distance.masked_fill(distance < 0, torch.inf))


def _latent_attention(at: Place) -> list[Part]:
    return at.same(
        "q_proj.weight down_proj.weight:kv_a_proj_with_mqa.weight up_proj.weight:kv_b_proj.weight "
        "norm.weight:kv_a_layernorm.weight out_proj.weight:o_proj.weight"
    )


def _rwkv7(at: Place) -> list[Part]:
    mixed, row = [f"x_{name}" for name in MIXED], Change(lambda t: t.view(1, -1), lambda t: t[None])
    return [
        at.part("mix", mixed, (1,) * len(mixed), changes=(row,), anywhere=True),
        *at.same(
            "removal:k_k writing:k_a bonus:r_k norm.*:g_norm.* out_proj.weight:o_proj.weight "
            "r_proj.weight k_proj.weight v_proj.weight decay_in.weight:w_lora.lora.0.weight "
            "decay_out.weight:w_lora.lora.2.weight decay_bias:w_lora.lora.2.bias "
            "rate_in.weight:a_lora.lora.0.weight rate_out.weight:a_lora.lora.2.weight "
            "rate_bias:a_lora.lora.2.bias gate_in.weight:g_lora.lora.0.weight "
            "gate_out.weight:g_lora.lora.2.weight"
        ),
    ]


def _channel_mixing(at: Place) -> list[Part]:
    return at.same("mix:ffn.x_k in_proj.weight:ffn.key.weight out_proj.weight:ffn.value.weight")


def _moe(at: Place) -> list[Part]:
    experts, own = at.names.experts, at.keywords
    assert experts
    n, shared = own["experts"], own["d_shared"]
    stacked = Change(lambda t: t.unflatten(0, (n, -1)), lambda t: t.flatten(0, 1))
    parts = at.same(f"router.weight:{experts.router}.weight")
    for ours, maps, rows, whole in (
        ("in_weight", experts.up, own["d_hidden"], experts.whole[0]),
        ("out_weight", (experts.down,), own["d_model"], experts.whole[1]),
    ):
        if "{}" not in maps[0]:
            parts += at.same(f"{ours}:{maps[0]}.weight")
            continue
        official = [f"{name.format(i)}.weight" for i in range(n) for name in maps]
        part = at.part(ours, official, (rows,) * len(official))
        parts.append(part._replace(joined=stacked, whole=whole and at.there + whole))
    if own["correction"]:
        parts += at.same(f"correction:{experts.correction}")
    if shared:
        up, down = experts.always
        parts += at.linear("always.in_proj", up, False, [shared] * len(up))
        parts += at.linear("always.out_proj", [down], False)
    return parts + (
        at.same(f"gate.weight:{experts.gate}.weight")
        if getattr(own["shared"], "gate", False)
        else []
    )


_MAKE: Mapping[str, Callable[[Place], list[Part]]] = {
    "attention": _attention,
    "sliding_attention": _sliding_attention,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "gated_conv": _gated_conv,
    "gated_delta_net": _gated_delta_net,
    "kimi_delta_attention": _kimi_delta_attention,
    "latent_attention": _latent_attention,
    "lightning_attention": _lightning_attention,
    "mlstm": _mlstm,
    "rg_lru": _rg_lru,
    "h3": h3_parts,
    "rwkv7": _rwkv7,
    "channel_mixing": _channel_mixing,
    "feed_forward": _feed_forward,
    "moe": _moe,
}
_OUTSIDE = ("attention", "sliding_attention", "channel_mixing", "feed_forward", "moe")
"""Layers whose tensors do not have the prefix ``Names.inner``."""
