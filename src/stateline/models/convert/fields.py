"""Settings that decoders of Hugging Face have in common, in both directions."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.models.build import MAX_LAYERS
from stateline.models.config import ModelConfig
from stateline.models.convert.parts import Layer, first_keywords
from stateline.models.convert.weights import count, flag, number, section
from stateline.models.pattern import Value

Settings = Mapping[str, Any]

FULL = ("full_attention", "attention", "global")
"""Words for attention to all positions in lists of layer types."""


def runs(names: Sequence[str]) -> str:
    """A pattern of layers in order.

    Example:
        >>> runs(["attention", "attention", "sliding_attention"])
        'attention*2 sliding_attention'
    """
    groups = ((name, len(list(group))) for name, group in groupby(names))
    return " ".join(name if n == 1 else f"{name}*{n}" for name, n in groups)


def composed(
    mixers: Sequence[str], sparse: Sequence[bool], layers: Mapping[str, Mapping[str, Value]]
) -> dict[str, Any]:
    """Settings of a model of mixers that are each followed by a feed-forward with a SwiGLU.

    Args:
        mixers: The mixers.
        sparse: Whether each feed-forward is a mixture of experts.
        layers: Keywords by kind of layer, of which those that the model has are returned.
    """
    mixed = len(set(sparse)) > 1
    kind = "none" if mixed else "moe" if sparse[0] else "swiglu"
    names = [
        name
        for mixer, experts in zip(mixers, sparse, strict=True)
        for name in (mixer, "moe" if experts else "feed_forward")
        if name == mixer or mixed or not LAYERS[mixer].wants_feed_forward
    ]
    kinds = {*names, "moe" if kind == "moe" else "feed_forward"}
    used = {name: dict(keywords) for name, keywords in layers.items() if name in kinds}
    if "feed_forward" in kinds:
        used.setdefault("feed_forward", {})["activation"] = "swiglu"
    return {"pattern": runs(names), "feed_forward": kind, "layers": used}


def layer_count(settings: Settings, name: str = "num_hidden_layers") -> int:
    """Number of layers; InputError if it is not from 1 to the largest that a model may have."""
    if (n := count(settings, name)) > MAX_LAYERS:
        raise InputError(f"{name} must be at most {MAX_LAYERS}, got {n}")
    return n


def layer_types(settings: Settings, *names: str, known: Sequence[str] = ()) -> list[str] | None:
    """The kind of each layer, from the first of these settings that is present, or ``None``.

    Args:
        settings: As in ``config.json``.
        names: Names of the setting.
        known: Kinds that layers may have.

    Raises:
        InputError: If it is not a known word for each layer.
    """
    types = next((settings[name] for name in names if settings.get(name) is not None), None)
    n = layer_count(settings)
    if types is None:
        return None
    words = isinstance(types, list) and all(isinstance(word, str) for word in types)
    if not words or len(types) != n:
        raise InputError(f"layer_types must name {n} layers, got {types!r:.80}")
    if unknown := sorted(set(types) - set(known)):
        raise InputError(f"layers must be {', '.join(known)}, got {unknown[0]!r}")
    return list(types)


def layer_indices(settings: Settings, name: str) -> list[int] | None:
    """Numbers of some layers; ``None`` if they are missing.

    Raises:
        InputError: If the setting is not a list of integers.
    """
    found = settings.get(name)
    if found is not None and not (isinstance(found, list) and all(type(i) is int for i in found)):
        raise InputError(f"{name} must be a list of layers, got {found!r:.80}")
    return found


class Field(NamedTuple):
    """A field of ``config.json`` that is one of our settings.

    Attributes:
        theirs: The name of the field.
        ours: Name of a setting of our model, or LAYER.KEYWORD.
        default: The value if the field is missing, which also defines its type. ``None``: the field
            is a required positive integer.
    """

    theirs: str
    ours: str
    default: float | None = None


_INERT = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation_internal _name_or_path architectures attn_implementation auto_map
    bos_token_id cls_token_id decoder_start_token_id dtype eos_token_id finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range keys_to_ignore_at_inference label2id max_sequence_length
    mlp_dropout model_max_length model_type name_or_path num_labels output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id
    task_specific_params tokenizer_class torch_dtype torchscript transformers_version unk_token_id
    transformers.js_config unsloth_version use_bfloat16 use_cache
    summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels
    summary_type summary_use_proj
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout
    embd_pdrop embed_dropout
    hidden_dropout hidden_dropout_prob resid_dropout resid_pdrop
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length
    max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep
    num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
INERT = frozenset(_INERT.split())
"""Fields of any family without effect on the logits: names, tokens, initial values, classifiers,
dropout (used only in training), and options of transformers for computing or generating."""

ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
}
"""Supported values of fields that any family may have."""

HEADS = "num_attention_heads num_key_value_heads head_dim"
ROPE = "rope_theta rope_scaling rope_parameters max_position_embeddings"
PARTIAL_ROPE = f"{ROPE} partial_rotary_factor"
"""Fields that :func:`heads` and :func:`rope` read; :meth:`Fields.write` writes these, too."""

_HEADS = {
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
}


class Fields(NamedTuple):
    """The fields of a family's ``config.json``; any other field is an error.

    Attributes:
        ours: Fields with a counterpart among our settings.
        reads: Names of other fields that the converter of the family reads.
        only: Supported values of a field; the default of transformers is the first.
        inert: Names of fields without effect on the logits, besides ``INERT``.
        depth: The field with the number of layers; empty if a list of layers has this number.
    """

    ours: tuple[Field, ...]
    reads: str = ""
    only: Mapping[str, tuple[Any, ...]] = {}
    inert: str = ""
    depth: str = "num_hidden_layers"

    def read(
        self, settings: Settings, without: str = ""
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Settings of the model, and keywords by layer.

        Args:
            settings: As in ``config.json``.
            without: A kind of layer that the model does not have; its fields are inert.

        Raises:
            InputError: If a field is missing, unknown, or has a value that is not supported.
        """
        self._check(settings)
        model: dict[str, Any] = {}
        layers: dict[str, dict[str, Any]] = {}
        for field in self.ours:
            layer, _, keyword = field.ours.rpartition(".")
            if without and layer == without:
                continue
            place = layers.setdefault(layer, {}) if layer else model
            place[keyword] = _value(settings, field)
        return model, layers

    def write(self, config: ModelConfig, blocks: Sequence[tuple[Layer, ...]]) -> dict[str, Any]:
        """The inverse of :meth:`read`; the first layer of a kind stands for all."""
        settings = {name: known[0] for name, known in self.only.items()}
        settings |= {self.depth: len(blocks)} if self.depth else {}
        kinds = {layer.name for block in blocks for layer in block}
        if HEADS in self.reads:
            attention = first_keywords(blocks, "attention", "sliding_attention")
            settings |= {theirs: attention[ours] for ours, theirs in _HEADS.items()}
            settings |= rope_back(attention) if ROPE in self.reads else {}
        for field in self.ours:
            layer, _, keyword = field.ours.rpartition(".")
            if layer in ("feed_forward", "moe") and layer not in kinds:
                continue
            same = ("attention", "sliding_attention") if layer == "attention" else (layer,)
            found = first_keywords(blocks, *same)[keyword] if layer else getattr(config, keyword)
            settings[field.theirs] = found is True if isinstance(field.default, bool) else found
        return settings

    def _check(self, settings: Settings) -> None:
        accounted = {*INERT, *self.inert.split(), *self.reads.split(), self.depth}
        accounted |= {field.theirs for field in self.ours}
        only = {**ONLY, **self.only}
        for name, value in settings.items():
            if name in accounted or value is None:
                continue
            if name not in only:
                raise InputError(
                    f"{name}={value!r:.80} has no counterpart here: if it has no effect on the "
                    f"model, leave it out with --settings '{{\"{name}\": null}}'"
                )
            if value not in only[name]:
                known = " or ".join(repr(word) for word in only[name])
                raise InputError(f"{name}={value!r:.80} is not supported, only {known} is")


def _value(settings: Settings, field: Field) -> Value:
    name, default = field.theirs, field.default
    if isinstance(default, bool):
        return flag(settings, name, default)
    if isinstance(default, float):
        return number(settings, name, default)
    return count(settings, name, default)


VOCABULARY = Field("vocab_size", "vocab_size")
WIDTH = Field("hidden_size", "d_model")
HIDDEN = Field("intermediate_size", "feed_forward.d_hidden")
TIED = Field("tie_word_embeddings", "tie_embeddings", False)


def heads(settings: Settings, kv_default: int | None = None) -> dict[str, Value]:
    """Numbers of heads and their width.

    Args:
        settings: As in ``config.json``.
        kv_default: Number of key heads if the field is missing; ``None``: as many as query heads.
    """
    n_heads = count(settings, "num_attention_heads")
    default = kv_default or n_heads
    given = settings.get("num_key_value_heads", default) is not None
    n_kv_heads = count(settings, "num_key_value_heads", default) if given else n_heads
    keywords: dict[str, Value] = {"n_heads": n_heads}
    if n_kv_heads != n_heads:
        keywords["n_kv_heads"] = n_kv_heads
    if settings.get("head_dim") not in (None, count(settings, "hidden_size") / n_heads):
        keywords["d_head"] = count(settings, "head_dim")
    return keywords


def head_width(settings: Settings) -> int:
    """Width of a head."""
    usual = count(settings, "hidden_size") // count(settings, "num_attention_heads")
    return usual if settings.get("head_dim") is None else count(settings, "head_dim")


def rope(
    settings: Settings, *, base: float = 10_000.0, fraction: float | None = None
) -> dict[str, Value]:
    """Rotary positions; newer files have ``rope_parameters``, older ones single fields.

    As in transformers, ``rope_scaling`` replaces ``rope_parameters``, and single fields hold where
    neither has a value.

    Args:
        settings: As in ``config.json``.
        base: ``rope_theta`` where it is missing.
        fraction: ``partial_rotary_factor`` where it is missing; ``None`` if all entries of a head
            are rotated in this family.

    Raises:
        InputError: If frequencies are scaled in a way that is not supported.
    """
    given = {
        "rope_theta": settings.get("rope_theta", base),
        "partial_rotary_factor": settings.get("partial_rotary_factor", fraction or 1.0),
        "original_max_position_embeddings": settings.get("max_position_embeddings"),
        **(section(settings, "rope_scaling") or section(settings, "rope_parameters")),
    }
    if unknown := sorted(name for name in given if name not in _ROPE and given[name] is not None):
        raise InputError(
            f"rotary positions with {unknown[0]}={given[unknown[0]]!r:.80} are not supported"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    keywords: dict[str, Value] = {
        "position": "rope",
        "rope_base": number(given, "rope_theta", base),
    }
    if (part := number(given, "partial_rotary_factor", 1.0)) != 1:
        keywords["rotary_fraction"] = part
        if fraction is None:
            raise InputError(f"partial_rotary_factor={part} is not supported in this family")
        d_head = head_width(settings)
        if not 0 < part < 1 or int(d_head * part) % 2:
            raise InputError(
                f"rotary positions rotate pairs of entries, got {d_head * part:g} of {d_head}"
            )
    if kind not in ("default", "linear", "llama3"):
        raise InputError(
            f"rotary positions scaled by {kind!r} are not supported: only 'linear' and 'llama3' are"
        )
    if kind == "default":
        return keywords
    keywords |= {"rope_scaling": kind, "rope_factor": number(given, "factor", 1.0)}
    if kind == "llama3":
        keywords |= {
            "rope_low": number(given, "low_freq_factor", 1.0),
            "rope_high": number(given, "high_freq_factor", 4.0),
            "rope_original_len": count(given, "original_max_position_embeddings"),
        }
    return keywords


_ROPE = {
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "mrope_interleaved",  # of images; the positions of text are the same on all its axes
    "mrope_section",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "type",
}
"""Parameters of rotary positions that are read, or have no effect."""


def rope_back(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`rope`, as transformers 5 writes it; empty without rotary positions."""
    if keywords["position"] != "rope":
        return {}
    parameters = {
        "rope_type": "default" if keywords["rope_scaling"] == "none" else keywords["rope_scaling"],
        "rope_theta": keywords["rope_base"],
        "partial_rotary_factor": keywords["rotary_fraction"],
    }
    if keywords["rope_scaling"] != "none":
        parameters["factor"] = keywords["rope_factor"]
    if keywords["rope_scaling"] == "llama3":
        parameters |= {
            "low_freq_factor": keywords["rope_low"],
            "high_freq_factor": keywords["rope_high"],
            "original_max_position_embeddings": keywords["rope_original_len"],
        }
    return {"rope_parameters": parameters}


def bias(settings: Settings, qkv: str, out: str) -> Value:
    """Which projections of attention have biases."""
    on_qkv, on_out = bool(settings.get(qkv)), bool(settings.get(out))
    return on_qkv if on_qkv == on_out else ("qkv" if on_qkv else "out")


def windowed(
    types: Sequence[str], attention: Mapping[str, Value], window: int | None
) -> dict[str, dict[str, Value]]:
    """Keywords of the attention layers that a model has, with and without a window."""
    layers = {"attention": {**attention}, "sliding_attention": {**attention, "window": window}}
    return {name: keywords for name, keywords in layers.items() if name in types}
