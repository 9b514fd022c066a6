"""Zamba2: Mamba-2 layers, and transformers with adapters that stand at several depths."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.decoder_parts import layer_parts
from stateline.models.convert.fields import Draft, Fields, Rule, Settings, Written
from stateline.models.convert.parts import Layer, Names, Part, Place, expanded, layer_of
from stateline.models.convert.weights import count, flag
from stateline.models.pattern import parse_pattern, runs

_KIND = "shared_transformer"
NAMES = Names(
    embedding="model.embed_tokens",
    mixers=("mamba2",),
    base="model.",
    norm="model.final_layernorm",
    layer="model.layers.{}.",
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
    for name, wanted in (
        ("attention_head_dim", 2 * width // heads),
        ("head_dim", 2 * width // heads),
        ("attention_hidden_size", 2 * width),
        ("hybrid_layer_ids", starts),
        ("kv_channels", width // heads),
        ("mamba_headdim", d_head),
        ("num_key_value_heads", heads),
        ("num_query_groups", heads),
    ):
        if (given := settings.get(name, wanted)) != wanted and given is not None:
            raise InputError(f"{name} must be {wanted!r:.80} here, got {given!r:.80}")
    if settings.get("intermediate_size"):
        shared["d_hidden"] = count(settings, "intermediate_size")
    rope: Mapping[str, Any] = {"position": "none"}
    if flag(settings, "use_mem_rope", False):
        rope = fields.rope_keywords(settings)
    if unknown := rope.keys() - {"position", "rope_base"}:
        raise InputError(f"rotary positions with {sorted(unknown)[0]} are not supported here")
    shared |= {**rope, "first": hybrid[0], "blocks": min(shared["blocks"], len(starts))}
    edges = sorted({0, *starts, len(hybrid)})
    parts = (runs(["mamba2"] * (end - start)) for start, end in pairwise(edges))
    draft.put("pattern", f"{_KIND}({', '.join(parts)})")


def _write(model: Written) -> dict[str, Any]:
    shared, mamba2 = model.first(_KIND), model.first("mamba2")
    _, parts = _item(model.config)
    words = [
        _HYBRID[0] if j == 0 and (i or shared["first"]) else _PLAIN[0]
        for i, part in enumerate(parts)
        for j, _ in enumerate(part)
    ]
    return {
        "num_hidden_layers": len(words),
        "layers_block_type": words,
        "mamba_expand": int(mamba2["expand"]),
        "n_mamba_heads": int(mamba2["expand"] * model.config.d_model) // mamba2["d_head"],
        "intermediate_size": shared["d_hidden"],
        "num_key_value_heads": shared["n_heads"],
        "use_mem_rope": shared["position"] == "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": shared["rope_base"]},
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


def _item(config: ModelConfig) -> tuple[Mapping[str, Any], list[list[Layer]]]:
    """The keywords of the wrapper, and the layers of its parts.

    Raises:
        InputError: If the model is none of Mamba-2 layers in such a wrapper.
    """
    items = parse_pattern(config.pattern)
    item = items[0]
    parts = [expanded(part, config) for part in (item.core, *item.others) if part]
    plain = config.tie_embeddings and all(
        layer.name == "mamba2" for part in parts for layer in part
    )
    fits = config.block == "sequential" and config.norm == "rms" and not config.head_bias
    if len(items) > 1 or item.repeat > 1 or item.name != _KIND or not plain or not fits:
        raise InputError(
            f"models of this family are {_KIND}(mamba2, ...) with norm='rms' and tied embeddings, "
            f"got {config.pattern!r}"
        )
    keywords = layer_of(item.name, item.keywords, config).keywords
    return {**keywords, "d_hidden": keywords["d_hidden"] or 4 * config.d_model}, parts


def _settings(config: ModelConfig) -> dict[str, Any]:
    shared, parts = _item(config)
    layers = [(layer,) for part in parts for layer in part]
    return FIELDS.write(Written(config, [(Layer(_KIND, shared),), *layers]))


def _parts(config: ModelConfig, _: Settings) -> list[Part]:
    """All tensors of a model."""
    shared, blocks = _item(config)
    parts = Place().same(
        f"embedding.weight:{NAMES.embedding}.weight norm.weight:{NAMES.norm}.weight"
    )
    at, places = 0, []
    for i, layers in enumerate(blocks):
        for j, layer in enumerate(layers):
            here = f"stack.layers.0.core.layers.{i}." + (f"layers.{j}." if len(layers) > 1 else "")
            there = NAMES.layer.format(at)
            if j == 0 and (i or shared["first"]):
                places.append(there)
                there += "mamba_decoder."
            parts += Place(there, here).same("norm.weight:input_layernorm.weight")
            place = Place(there, f"{here}layer.", layer.keywords, NAMES, config.d_model)
            parts += layer_parts("mamba2", place)
            at += 1
    for i, there in enumerate(places):
        first = places[i % shared["blocks"]]
        place = Place(f"{first}shared_transformer.", f"stack.layers.0.places.{i}.", shared)
        parts += place._replace(there=there).same("out_proj.weight:linear.weight")
        parts += _adapters(place, i)
        if first == there:
            place = place._replace(here=f"stack.layers.0.blocks.{i}.", width=2 * config.d_model)
            parts += _block(place)
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
    bias = at.keywords["bias"]
    return [
        *at.linear("qkv", [f"self_attn.{name}_proj" for name in "qkv"], False, [at.width] * 3),
        *at.linear("up", ["feed_forward.gate_up_proj"], bias),
        *at.linear("down", ["feed_forward.down_proj"], bias),
        *at.same(
            "norm.weight:input_layernorm.weight out_proj.weight:self_attn.o_proj.weight "
            "feed_forward_norm.weight:pre_ff_layernorm.weight"
        ),
    ]


CONVERTERS = {
    "zamba2": family(NAMES, FIELDS, zamba2="Zamba2ForCausalLM")._replace(
        settings=_settings, parts=_parts
    )
}
"""By ``model_type``."""
