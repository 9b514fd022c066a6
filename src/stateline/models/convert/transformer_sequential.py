"""The models of "Staircase Attention", from the weights of its official code."""

from typing import Literal, get_args

from stateline.errors import InputError, unknown_name
from stateline.models.config import ModelConfig
from stateline.models.convert.converter import Converter
from stateline.models.convert.fields import Settings
from stateline.models.convert.parts import Change, Names, Part, Place, model_layers, unwrapped
from stateline.models.convert.weights import count
from stateline.pattern import Value

Architecture = Literal["transformer_xl", "ladder", "staircase", "cached_staircase", "feedback"]

_DISTANCES = Change(lambda t: t[0].mT.flip(0), lambda t: t.flip(0).mT[None])
"""Officially, keys of positions are columns, and the largest distance comes first."""
_MIXTURE = Change(lambda t: t[0], lambda t: t[None])


def transformer_sequential_config(settings: Settings) -> ModelConfig:
    """Our configuration of a model of ``facebookresearch/transformer-sequential``.

    Differs from the official models as our layers do: the first tokens do not attend to zeros
    before them, and a staircase carries the inputs of its layers, not their outputs. Official
    layers share one table of position keys; here each layer has a copy.

    Args:
        settings: Its arguments (``nlayers``, ``hid_sz``, ...), and ``kind`` (by default
            ``transformer_xl``); for ``ladder`` also ``order``, the order in which layers run; for
            ``cached_staircase`` also ``M`` and ``global_cache``.

    Raises:
        InputError: If the arguments ask for a model that we do not have.

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021.
    """
    kind = _kind(settings)
    attention: dict[str, Value] = {
        "n_heads": count(settings, "nheads"),
        "window": count(settings, "attn_lim"),
        "position": "relative",
        # A layer with its own memory does not attend to the current position.
        "includes_self": kind in ("staircase", "cached_staircase"),
    }
    return ModelConfig(
        _pattern(settings, kind),
        vocab_size=count(settings, "vocab_sz"),
        d_model=count(settings, "hid_sz"),
        block="sequential" if settings.get("pre_norm") else "post_norm",
        feed_forward="relu",
        tie_embeddings=False,
        head_bias=True,
        layers={
            "sliding_attention": attention,
            "feed_forward": {"d_hidden": count(settings, "inner_hid_sz")},
        },
    )


def _kind(settings: Settings) -> str:
    if (kind := settings.get("kind", "transformer_xl")) not in get_args(Architecture):
        raise unknown_name("kind", str(kind), get_args(Architecture))
    return str(kind)


def transformer_sequential_parts(config: ModelConfig, settings: Settings) -> list[Part]:
    """All tensors, by our names and the official ones."""
    kind = _kind(settings)
    prefix = "transformer." if kind in ("staircase", "cached_staircase") else ""
    parts = Place().same("embedding.weight:in_emb.weight head.*:out.out_emb.*")
    if settings.get("pre_norm"):
        parts += Place().same("norm.*:out_norm.*")
    if kind == "feedback":
        parts += Place().same("stack.layers.0.mixture:single_memory_attn_params", _MIXTURE)
    branches = [layer.path.removesuffix("layer.") for layer in unwrapped(model_layers(config))]
    pairs = zip(branches[::2], branches[1::2], strict=True)
    for layer, (attention, feed_forward) in enumerate(pairs):
        at = Place(f"{prefix}layers.{layer}.", attention)
        parts += at.same("layer.position_keys:attn.attn.key_pe", _DISTANCES)
        keys = at.part(
            "layer.kv_proj.weight",
            ("attn.proj_key.weight", "attn.proj_val.weight"),
            (count(settings, "hid_sz"),) * 2,
        )
        shared = layer > 0 and settings.get("share_proj_kv")
        parts.append(keys._replace(ours="") if shared else keys)
        parts += at.same(
            "layer.q_proj.weight:attn.proj_query.weight layer.out_proj.weight:attn.proj_out.weight "
            "norm.*:norm1.*"
        )
        at = at._replace(here=feed_forward)
        parts += at.same("norm.*:norm2.* layer.in_proj.*:ff.fc1.* layer.out_proj.*:ff.fc2.*")
    return parts


def _pattern(settings: Settings, kind: str) -> str:
    n_layers = count(settings, "nlayers")
    core = f"sliding_attention*{n_layers}"
    if kind == "transformer_xl":
        return core
    if kind == "ladder":
        passes = len(settings["order"]) // n_layers
        if _repeats_layers(settings):
            return f"ladder(sliding_attention, passes={passes})*{n_layers}"
        return f"ladder({core}, passes={passes})"
    if kind == "feedback":
        shared = str(bool(settings.get("share_proj_kv"))).lower()
        return f"feedback({core}, window={count(settings, 'attn_lim')}, shared={shared})"
    chunk_len = count(settings, "fix_staircase_size_forward")
    steps = count(settings, "staircase_size") // chunk_len
    if kind == "staircase":
        return f"staircase({core}, passes={steps}, chunk_len={chunk_len})"
    seen = "none" if settings.get("global_cache") else steps
    passes = count(settings, "M")
    return f"cached_staircase({core}, passes={passes}, chunk_len={chunk_len}, steps={seen})"


def _repeats_layers(settings: Settings) -> bool:
    """True if the order of a ladder is AABB, False if it is ABAB."""
    order, n_layers = list(settings["order"]), count(settings, "nlayers")
    passes = max(1, len(order) // n_layers)
    if order == list(range(n_layers)) * passes:
        return False
    if order == [layer for layer in range(n_layers) for _ in range(passes)]:
        return True
    raise InputError(f"a ladder's order must be ABAB or AABB, got {order}")


CONVERTERS = {
    "transformer_sequential": Converter(
        Names(embedding="in_emb", head="out.out_emb"),
        transformer_sequential_config,
        recognise=lambda _, tensors: {"in_emb.weight", "out.out_emb.weight"} <= set(tensors),
        parts=transformer_sequential_parts,
        one_way="official layers share one table of positions; ours, once trained, differ",
    )
}
"""By name of the format."""
