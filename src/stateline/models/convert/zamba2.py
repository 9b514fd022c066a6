"""Zamba2: Mamba-2 layers, and transformers with adapters that stand at several depths."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.fields import Draft, Fields, Rule, Settings
from stateline.models.convert.parts import Layer, Names, Part, Place, Written, groups, inner_width
from stateline.models.convert.weights import count, flag
from stateline.pattern import parse_value, runs

_KIND = "shared_transformer"
NAMES = Names(
    embedding="model.embed_tokens",
    mixers=("mamba2",),
    wrapper=_KIND,
    base="model.",
    norm="model.final_layernorm",
    layer="model.layers.{}.",
    norms=("input_layernorm",),
    inner="mamba.",
)
_HYBRID = ("hybrid",)
_PLAIN = ("linear_attention", "mamba")


def _read(draft: Draft) -> None:
    settings, shared, width = draft.settings, draft.layers[_KIND], draft.model["d_model"]
    hybrid = _hybrid(settings)
    expand, n_heads = count(settings, "mamba_expand", 2), count(settings, "n_mamba_heads", 8)
    d_head = expand * width // n_heads
    draft.layers["mamba2"] |= {"expand": float(expand), "d_head": d_head}
    heads, starts = shared["n_heads"], [i for i, is_hybrid in enumerate(hybrid) if is_hybrid]
    fields.agree(
        settings,
        attention_head_dim=2 * width // heads,
        head_dim=2 * width // heads,
        attention_hidden_size=2 * width,
        hybrid_layer_ids=starts,
        kv_channels=width // heads,
        mamba_headdim=d_head,
        num_key_value_heads=heads,
        num_query_groups=heads,
    )
    if settings.get("intermediate_size"):
        shared["d_hidden"] = count(settings, "intermediate_size")
    rope: Mapping[str, Any] = {"position": "none"}
    if flag(settings, "use_mem_rope", False):
        rope = fields.rope_keywords(settings)
        if unknown := sorted(parse_value(str(rope["position"])).keywords.keys() - {"base"}):
            raise InputError(f"rotary positions with {unknown[0]} are not supported here")
    shared |= {**rope, "first": hybrid[0], "blocks": min(shared["blocks"], len(starts))}
    edges = sorted({0, *starts, len(hybrid)})
    parts = (runs(["mamba2"] * (end - start)) for start, end in pairwise(edges))
    draft.put("pattern", f"{_KIND}({', '.join(parts)})")


def _write(model: Written) -> dict[str, Any]:
    shared, mamba2 = model.first(_KIND), model.first("mamba2")
    starts = _starts(model.layers[0])
    return {
        "layers_block_type": [
            _HYBRID[0] if i in starts else _PLAIN[0] for i, _ in enumerate(model.blocks)
        ],
        "mamba_expand": int(mamba2["expand"]),
        "n_mamba_heads": inner_width(mamba2, model.config) // mamba2["d_head"],
        "intermediate_size": shared["d_hidden"],
        "num_key_value_heads": shared["n_heads"],
        "use_mem_rope": shared["position"] != "none",
        **fields.rope_back(shared),
    }


FIELDS = Fields(
    (
        fields.VOCABULARY,
        fields.WIDTH,
        *fields.norms(1e-5, _KIND),
        *fields.several(
            _KIND,
            "num_attention_heads=n_heads:32 num_mem_blocks=blocks:1 adapter_rank=rank:128 "
            "use_shared_attention_adapter=adapts_attention:False add_bias_linear=bias:False",
        ),
        *fields.several(
            "mamba2",
            "add_bias_linear=bias:False mamba_d_state=d_state:64 mamba_ngroups=n_groups:1 "
            "mamba_d_conv=d_conv:4 time_step_min=min_step:1e-3",
        ),
        Rule(
            f"{fields.ROPE} attention_head_dim attention_hidden_size head_dim hybrid_layer_ids "
            "intermediate_size kv_channels layer_types layers_block_type mamba_expand "
            "mamba_headdim n_mamba_heads num_key_value_heads num_query_groups use_mem_rope",
            _read,
            _write,
        ),
    ),
    {
        "hidden_act": ("gelu",),
        "use_long_context": (False,),
        "tie_word_embeddings": (True,),  # otherwise transformers does not share the blocks, either
    },
    "chunk_size num_logits_to_keep time_step_floor time_step_max use_conv_bias use_mamba_kernels "
    "use_mem_eff_path",
    {"feed_forward": "none"},
)


def _hybrid(settings: Settings) -> list[bool]:
    """Whether a transformer stands before each layer."""
    names = "layers_block_type layer_types"
    types = fields.layer_types(settings, names, (*_HYBRID, *_PLAIN))
    if types is None:
        at, n = {*range(6, 43, 6), 47, 51}, fields.layer_count(settings)
        if n != 54:
            raise InputError(f"layers_block_type must name {n} layers, got none")
        return [i in at for i in range(n)]
    found = [word in _HYBRID for word in types]
    if not any(found):
        raise InputError("layers_block_type must have a 'hybrid', got none")
    return found


def _starts(wrapper: Layer) -> list[int]:
    """Numbers of the layers before which a transformer stands."""
    starts = accumulate((len(part) for part in wrapper.parts[:-1]), initial=0)
    return list(starts)[not wrapper.keywords["first"] :]


def _parts(config: ModelConfig, _: Settings) -> list[Part]:
    """All tensors of a model."""
    (wrapper,) = groups(config, NAMES).layers
    shared, starts = wrapper.keywords, _starts(wrapper)
    parts = decoder_parts(config, NAMES, lambda i: "mamba_decoder." if i in starts else "")
    for i, start in enumerate(starts):
        here, there = f"{wrapper.path}places.{i}.", NAMES.layer.format(start)
        parts += Place(there, here).same("out_proj.weight:linear.weight")
        first = NAMES.layer.format(starts[i % shared["blocks"]])
        place = Place(f"{first}shared_transformer.", here, shared)
        parts += _adapters(place, i)
        if first == there:
            parts += _block(place._replace(here=f"{wrapper.path}blocks.{i}."))
    return parts


def _adapters(at: Place, i: int) -> list[Part]:
    """The tensors of the adapters of a depth."""
    maps = {"feed_forward.in_proj": ["feed_forward.gate_up_proj_adapter_list"]}
    if at.keywords["adapts_attention"]:
        maps["attention.qkv"] = [f"self_attn.linear_{name}_adapter_list" for name in "qkv"]
    found = []
    for ours, lists in maps.items():
        down = [f"{name}.{i}.0.weight" for name in lists]
        found.append(at.part(f"{ours}.down.weight", down, [at.keywords["rank"]] * len(down)))
        for j, name in enumerate(lists):
            found += at.same(f"{ours}.up.{j}.weight:{name}.{i}.1.weight")
    return found


def _block(at: Place) -> list[Part]:
    """The tensors that all depths of a transformer share."""
    bias, width = at.keywords["bias"], 2 * at.keywords["d_model"]
    return [
        *at.linear("qkv", [f"self_attn.{name}_proj" for name in "qkv"], False, [width] * 3),
        *at.linear("up", ["feed_forward.gate_up_proj"], bias),
        *at.linear("down", ["feed_forward.down_proj"], bias),
        *at.same(
            "norm.weight:input_layernorm.weight out_proj.weight:self_attn.o_proj.weight "
            "feed_forward_norm.weight:pre_ff_layernorm.weight"
        ),
    ]


CONVERTERS = {"zamba2": family(NAMES, FIELDS, zamba2="Zamba2ForCausalLM")._replace(parts=_parts)}
"""By ``model_type``."""
