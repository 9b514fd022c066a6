"""The tensors of each layer of a model, by our names and the official names."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.models.config import ModelConfig
from stateline.models.convert.parts import (
    KERNEL,
    SAME,
    TRANSPOSED,
    Change,
    Names,
    Part,
    both,
    by_head,
    groups,
    same,
)

Keywords = Mapping[str, Any]


def decoder_parts(config: ModelConfig, names: Names) -> list[Part]:
    """All tensors of a model.

    Args:
        config: Configuration of the model.
        names: Names of the format.

    Raises:
        InputError: If the model has layers that the format does not know.
    """
    norm_parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    parts = same({"embedding.weight": f"{names.embedding}.weight"})
    if config.max_len and names.positions:
        n = names.unused_positions
        skip = Change(lambda t: t[n:], lambda t: F.pad(t, (0, 0, n, 0)))
        parts.append(Part("positions.weight", (f"{names.positions}.weight",), changes=(skip,)))
    parts += same(both("norm", names.norm, norm_parts))
    if not config.tie_embeddings:
        parts += same({"head.weight": f"{names.head}.weight"})
    for number, group in enumerate(groups(config, names)):
        there = names.layer.format(number)
        norms = names.norms_after if group[0].name in config.norm_after.split() else names.norms
        for branch, layer in enumerate(group):
            here = f"stack.layers.{len(group) * number + branch}."
            if config.block == "parallel":
                here = f"stack.layers.{number}.branches.{branch}."
            parts += same(both("norm", norms[branch], norm_parts), here, there)
            parts += _MAKE[layer.name](layer.keywords, names, there, f"{here}layer.", config)
    return parts


def _linear(
    ours: str,
    theirs: Sequence[str],
    bias: bool,
    names: Names,
    rows: Sequence[int] = (),
    change: Change = SAME,
) -> list[Part]:
    """Weight and bias of a linear map, which may join the rows of several official maps."""
    weight, biases = (tuple(f"{name}.{part}" for name in theirs) for part in ("weight", "bias"))
    sizes = tuple(rows) if len(theirs) > 1 else ()
    changes = (TRANSPOSED,) if names.transposed else (change,)
    parts = [Part(f"{ours}.weight", weight, sizes, changes)]
    return [*parts, Part(f"{ours}.bias", biases, sizes, (change,))] if bias else parts


def _ends(
    keywords: Keywords, names: Names, there: str, here: str, parts: Sequence[str] = ()
) -> list[Part]:
    """The first and the last map of a layer, and others that have the same names."""
    found = [Part(here + name, (there + name,)) for name in parts]
    for name in ("in_proj", "out_proj"):
        found += _linear(here + name, [there + name], keywords["bias"], names)
    return found


def _kernel(here: str, there: str, bias: bool = False) -> list[Part]:
    kernel = Part(f"{here}conv.kernel", (f"{there}.weight",), changes=(KERNEL,))
    return [kernel, *same({"conv.bias": f"{there}.bias"}, here)] if bias else [kernel]


def _attention(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    rows = [keywords[n] * keywords["d_head"] for n in ("n_heads", "n_kv_heads", "n_kv_heads")]
    rows[0] *= 1 + keywords["gated"]
    bias, qkv = keywords["bias"], [f"{there}{name}" for name in names.qkv]
    n_heads, d_head = keywords["n_heads"], keywords["d_head"]
    change = by_head(n_heads, [d_head] * 3) if names.by_head else SAME
    parts = _linear(f"{here}qkv", qkv, bias in (True, "qkv"), names, rows, change)
    parts += _linear(f"{here}out_proj", [there + names.out], bias in (True, "out"), names)
    if keywords["qk_norm"]:
        for ours, theirs in zip(("q_norm", "k_norm"), names.qk_norms, strict=True):
            parts += same({f"{ours}.weight": f"{theirs}.weight"}, here, there)
    return parts


def _sliding_attention(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    rows = [keywords["n_kv_heads"] * keywords["d_head"]] * 2
    bias, (q, *kv) = keywords["bias"], [f"{there}{name}" for name in names.qkv]
    parts = _linear(f"{here}q_proj", [q], bias in (True, "qkv"), names)
    parts += _linear(f"{here}kv_proj", kv, bias in (True, "qkv"), names, rows)
    return parts + _linear(f"{here}out_proj", [there + names.out], bias in (True, "out"), names)


def _mamba(keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig) -> list[Part]:
    there += names.inner
    norms = tuple(f"{there}{name}_layernorm.weight" for name in ("dt", "b", "c"))
    rows = (keywords["dt_rank"], keywords["d_state"], keywords["d_state"])
    steps = {"dt_weight": "dt_proj.weight", "dt_bias": "dt_proj.bias"}
    parts = same({"a_log": "A_log", "skip": "D", **steps}, here, there)
    parts += [Part(f"{here}norm_weight", norms, rows)] if keywords["learned_norms"] else []
    parts += _kernel(here, f"{there}conv1d", keywords["conv_bias"])
    return parts + _ends(keywords, names, there, here, ["x_proj.weight"])


def mamba2_parts(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    """The tensors of a Mamba-2 layer."""
    there += names.inner
    norm = {"norm_weight": "norm.weight"} if keywords["normalise"] else {}
    parts = same({"a_log": "A_log", "skip": "D", **norm}, here, there)
    parts += _kernel(here, f"{there}conv1d", keywords["conv_bias"])
    return parts + _ends(keywords, names, there, here, ["dt_bias"])


def _parallel(
    keywords: Keywords, names: Names, there: str, here: str, config: ModelConfig
) -> list[Part]:
    return [
        part
        for i, branch in enumerate(keywords["branches"])
        for part in _MAKE[branch.name](
            branch.keywords, names, there, f"{here}core.layers.{i}.", config
        )
    ]


def _gated_conv(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    there += names.inner
    return _kernel(here, f"{there}conv", keywords["bias"]) + _ends(keywords, names, there, here)


def _gated_delta_net(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    there += names.inner
    n_heads, n_key_heads, d_key = (keywords[n] for n in ("n_heads", "n_key_heads", "d_key"))
    d_value = round(keywords["expand_v"] * d_key)
    keys, values = n_key_heads * d_key, n_heads * d_value
    inputs = tuple(f"{there}{name}.weight" for name in names.delta)
    rows: tuple[int, ...] = (2 * keys + values, values, n_heads, n_heads)
    changes: tuple[Change, ...] = (SAME,)
    ends, kernels = ("norm", "out_proj"), _kernel(here, f"{there}conv1d")
    if len(inputs) == 6:
        rows = (keys, keys, values, values, n_heads, n_heads)
        ends, theirs = ("o_norm", "o_proj"), tuple(f"{there}{n}_conv1d.weight" for n in "qkv")
        # transformers writes equal thirds, whatever the sizes are
        cut = (keys, keys, values)
        kernels = [Part(f"{here}conv.kernel", theirs, cut, anywhere=True, changes=(KERNEL,))]
    if len(inputs) == 2:
        rows, shared = (2 * (keys + values), 2 * n_heads), n_heads // n_key_heads
        each = [d_key, d_key, shared * d_value, shared * d_value]
        changes = (by_head(n_key_heads, each), by_head(n_key_heads, [shared] * 2, -1))
    parts = [Part(f"{here}in_proj.weight", inputs, rows, changes)]
    equal = {"a_log": "A_log", "dt_bias": "dt_bias"}
    equal |= {"norm.weight": f"{ends[0]}.weight", "out_proj.weight": f"{ends[1]}.weight"}
    return parts + same(equal, here, there) + kernels


def _rg_lru(keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig) -> list[Part]:
    there += names.inner
    inputs = [f"{there}linear_y", f"{there}linear_x"]
    parts = _linear(f"{here}in_proj", inputs, True, names, [keywords["d_inner"]] * 2)
    parts += _linear(f"{here}out_proj", [f"{there}linear_out"], True, names)
    equal = {"rate": "rg_lru.recurrent_param"}
    for ours, theirs in (("decay", "recurrent"), ("input", "input")):
        equal |= {f"{ours}_{p}": f"rg_lru.{theirs}_gate_{p}" for p in ("weight", "bias")}
    return parts + same(equal, here, there) + _kernel(here, f"{there}conv_1d", bias=True)


def _h3(keywords: Keywords, names: Names, there: str, here: str, config: ModelConfig) -> list[Part]:
    return h3_parts(keywords, names, there + names.inner, here, config.d_model)


def h3_parts(keywords: Keywords, names: Names, there: str, here: str, d_model: int) -> list[Part]:
    """The tensors of an H3 layer."""
    qkv = [f"{there}{name}_proj" for name in "qkv"]
    parts = _linear(f"{here}qkv", qkv, True, names, [d_model] * 3)
    parts += _linear(f"{here}out_proj", [f"{there}output_linear"], True, names)
    for ours, theirs, rows in (
        ("shift", "ssm_k_kernel.kernel", d_model),
        ("diagonal", "kernel.kernel", d_model // keywords["d_head"]),
    ):
        change = _outputs_first(rows)
        parts.append(Part(f"{here}{ours}.c", (f"{there}{theirs}.C",), changes=(change,)))
    return parts + same(_H3, here, there)


_H3 = {
    "shift.b": "ssm_k_kernel.kernel.B",
    "shift.skip": "ssm_k_D",
    "diagonal.log_dt": "kernel.kernel.log_dt",
    "diagonal.log_decay": "kernel.kernel.inv_A_real",
    "diagonal.frequency": "kernel.kernel.A_imag",
    "diagonal.b": "kernel.kernel.B",
    "diagonal.skip": "D",
}


def _outputs_first(rows: int) -> Change:
    """Official readouts have an axis for the outputs of each channel; ours joins them."""
    return Change(lambda t: t.flatten(0, 1), lambda t: t.unflatten(0, (-1, rows)))


def _feed_forward(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    up, bias = [f"{there}{name}" for name in names.up], keywords["bias"]
    parts = _linear(f"{here}in_proj", up, bias, names, [keywords["d_hidden"]] * 2)
    return parts + _linear(f"{here}out_proj", [there + names.down], bias, names)


def _kimi_delta_attention(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    there += names.inner
    n_heads, inner = keywords["n_heads"], keywords["n_heads"] * keywords["d_head"]
    maps = ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_a_proj")
    rows = (inner, inner, inner, keywords["rank"], n_heads, keywords["rank"])
    flat = Change(lambda t: t.flatten(), lambda t: t.view(1, 1, n_heads, 1))
    kernels = tuple(f"{there}{name}_conv1d.weight" for name in "qkv")
    return [
        Part(f"{here}in_proj.weight", tuple(f"{there}{name}.weight" for name in maps), rows),
        Part(f"{here}conv.kernel", kernels, (inner,) * 3, (KERNEL,)),
        Part(f"{here}a_log", (f"{there}A_log",), changes=(flat,)),
        *same({"dt_bias": "dt_bias", "norm.weight": "o_norm.weight"}, here, there),
        *same({"decay_proj.weight": "f_b_proj.weight"}, here, there),
        *same({"gate_proj.weight": "g_b_proj.weight"}, here, there),
        *same({"out_proj.weight": "o_proj.weight"}, here, there),
    ]


def _mlstm(
    keywords: Keywords, names: Names, there: str, here: str, config: ModelConfig
) -> list[Part]:
    there += names.inner
    n_heads = keywords["n_heads"]
    keys, values = (round(keywords[n] * config.d_model) for n in ("expand_k", "expand_v"))
    gates = ("igate_preact", "fgate_preact")
    maps = tuple(f"{there}{name}.weight" for name in ("q", "k", "v", "ogate_preact", *gates))
    heads = Change(lambda t: t.unflatten(0, (n_heads, -1)), lambda t: t.flatten())
    return [
        Part(f"{here}in_proj.weight", maps, (keys, keys, values, values, n_heads, n_heads)),
        Part(f"{here}gate_bias", tuple(f"{there}{name}.bias" for name in gates), (n_heads,) * 2),
        Part(f"{here}norm_weight", (f"{there}multihead_norm.weight",), changes=(heads,)),
        *same({"out_proj.weight": "out_proj.weight"}, here, there),
    ]


def _lightning_attention(
    keywords: Keywords, names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    there += names.inner
    equal = {"qkv": "qkv_proj", "gate_proj": "output_gate", "norm": "norm", "out_proj": "out_proj"}
    weights = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in equal.items()}
    constants = (f"{there}{name}" for name in LIGHTNING)
    return same(weights, here, there) + [
        Part("", (name,), constant=partial(_lightning, name, keywords)) for name in constants
    ]


LIGHTNING = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Constants of lightning attention in files."""

_BLOCK = 256
"""Tokens for which these hold decays; transformers' default."""


def _lightning(name: str, keywords: Keywords) -> Tensor:
    """A constant: rates of the heads, or decays inside a block of tokens."""
    n_heads = keywords["n_heads"]
    rates = (1 / 2 ** (8 / n_heads)) ** (torch.arange(n_heads) + 1) * keywords["decay_scale"]
    rates, places = rates[:, None, None], torch.arange(_BLOCK) + 1
    if name.endswith("slope_rate"):
        return rates
    if name.endswith("query_decay"):
        return torch.exp(-rates * places[:, None])
    if name.endswith("key_decay"):
        return torch.exp(-rates * (_BLOCK - places[:, None]))
    distance = (rates * (places[:, None] - places))[None]
    return torch.exp(-distance.masked_fill(distance < 0, torch.inf))


def _latent_attention(
    _: Keywords, names: Names, there: str, here: str, __: ModelConfig
) -> list[Part]:
    equal = {
        "q_proj": "q_proj",
        "down_proj": "kv_a_proj_with_mqa",
        "norm": "kv_a_layernorm",
        "up_proj": "kv_b_proj",
        "out_proj": "o_proj",
    }
    weights = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in equal.items()}
    return same(weights, here, there + names.inner)


def _moe(
    keywords: Keywords, names: Names, there: str, here: str, config: ModelConfig
) -> list[Part]:
    assert names.experts
    experts, n = names.experts, keywords["experts"]
    stacked = Change(lambda t: t.unflatten(0, (n, -1)), lambda t: t.flatten(0, 1))
    parts = same({"router.weight": f"{experts.router}.weight"}, here, there)
    for ours, maps, rows, whole in (
        ("in_weight", experts.up, keywords["d_hidden"], experts.whole[0]),
        ("out_weight", (experts.down,), config.d_model, experts.whole[1]),
    ):
        if "{}" not in maps[0]:
            parts += same({ours: f"{maps[0]}.weight"}, here, there)
            continue
        theirs = tuple(f"{there}{name.format(i)}.weight" for i in range(n) for name in maps)
        whole = whole and there + whole
        parts.append(Part(here + ours, theirs, (rows,) * len(theirs), joined=stacked, whole=whole))
    if keywords["correction"]:
        parts += same({"correction": experts.correction}, here, there)
    if keywords["d_shared"]:
        up, down = experts.always
        rows = [keywords["d_shared"]] * len(up)
        parts += _linear(f"{here}always.in_proj", [there + u for u in up], False, names, rows)
        parts += _linear(f"{here}always.out_proj", [there + down], False, names)
    if keywords["gate_shared"]:
        parts += same({"gate.weight": f"{experts.gate}.weight"}, here, there)
    return parts


_MAKE: Mapping[str, Callable[[Keywords, Names, str, str, ModelConfig], list[Part]]] = {
    "attention": _attention,
    "sliding_attention": _sliding_attention,
    "mamba": _mamba,
    "mamba2": mamba2_parts,
    "gated_conv": _gated_conv,
    "gated_delta_net": _gated_delta_net,
    "kimi_delta_attention": _kimi_delta_attention,
    "latent_attention": _latent_attention,
    "lightning_attention": _lightning_attention,
    "mlstm": _mlstm,
    "rg_lru": _rg_lru,
    "h3": _h3,
    "parallel": _parallel,
    "feed_forward": _feed_forward,
    "moe": _moe,
}
