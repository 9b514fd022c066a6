"""What a ``config.json`` of Hugging Face holds, and our configuration from it and back."""

import re
from ast import literal_eval
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.layers.mixers.heads import Rope, Yarn
from stateline.models.build import MAX_LAYERS
from stateline.models.config import ModelConfig
from stateline.models.convert.parts import Names, Written, groups
from stateline.models.convert.weights import count, flag, number, section
from stateline.ops.positions import yarn_factor
from stateline.pattern import Value, format_value, runs
from stateline.settings import at_least

Settings = Mapping[str, Any]

FULL = {"full_attention": "attention", "attention": "attention", "global": "attention"}
"""Words for attention to all positions in lists of layer types."""
SLIDING = {**FULL, "sliding_attention": "sliding_attention"}


def layer_count(settings: Settings, name: str = "num_hidden_layers") -> int:
    """Number of layers; InputError if it is not from 1 to the largest that a model may have."""
    if (n := count(settings, name)) > MAX_LAYERS:
        raise InputError(f"{name} must be at most {MAX_LAYERS}, got {n}")
    return n


def layer_types(settings: Settings, names: str, known: Sequence[str]) -> list[str] | None:
    """The kind of each layer, from the first of the named settings that is present, or ``None``.

    Raises:
        InputError: If it is not a known word for each layer.
    """
    types = next((settings[name] for name in names.split() if settings.get(name) is not None), None)
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
    """A list of layer numbers; ``None`` if it is missing; InputError if it is something else."""
    found = settings.get(name)
    if found is not None and not (isinstance(found, list) and all(type(i) is int for i in found)):
        raise InputError(f"{name} must be a list of layers, got {found!r:.80}")
    return found


def agree(settings: Settings, **wanted: Any) -> None:
    """Check fields that follow from others; InputError for a value that is neither null nor so."""
    for name, value in wanted.items():
        if settings.get(name) not in (None, value):
            raise InputError(f"{name} must be {value!r:.80} here, got {settings[name]!r:.80}")


class Draft:
    """Our configuration while a ``config.json`` is read.

    Attributes:
        settings: What the file holds.
        model: Settings of our model.
        layers: Keywords by kind of layer; those of attention hold for sliding attention, too.
        mixers: The mixer of each layer; if empty, the first mixer of the family in each.
        sparse: Whether the feed-forward of each layer is a mixture of experts; if empty, none is.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model: dict[str, Any] = {}
        self.layers: dict[str, dict[str, Any]] = defaultdict(dict)
        self.mixers: list[str] = []
        self.sparse: list[bool] = []

    def put(self, place: str, value: Value) -> None:
        """Set a setting of the model, LAYER.KEYWORD, or a setting of the keyword's value.

        Such a setting, LAYER.KEYWORD.NAME, is for the value that the keyword has in the end.
        """
        *layer, keyword = place.split(".", maxsplit=1)
        (self.layers[layer[0]] if layer else self.model)[keyword] = value

    def spell(self) -> None:
        """Write settings of values into these values."""
        for own in self.layers.values():
            inner: dict[str, dict[str, Value]] = defaultdict(dict)
            for place in [name for name in own if "." in name]:
                keyword, _, name = place.partition(".")
                inner[keyword][name] = own.pop(place)
            own |= {keyword: format_value(own[keyword], each) for keyword, each in inner.items()}


class Rule(NamedTuple):
    """What some fields of ``config.json`` say about our configuration.

    Attributes:
        official: Names of the fields, separated by spaces.
        read: Reads them into our configuration.
        write: The fields of a model of ours.
    """

    official: str
    read: Callable[[Draft], None]
    write: Callable[[Written], Mapping[str, Any]] = lambda _: {}


def field(
    official: str,
    ours: str,
    default: float | None = None,
    words: Mapping[bool, Value] = {True: True, False: False},
) -> Rule:
    """A field that is one of our settings; the first layer of a kind stands for all.

    Fields of experts have no effect where no layer has experts.

    Args:
        official: The name of the field.
        ours: Name of a setting of our model, LAYER.KEYWORD, or LAYER.KEYWORD.NAME.
        default: The value if the field is missing, which also defines its type. ``None``: the field
            is a required positive integer.
        words: Our value for a field that is false, and for one that is true.
    """
    layer = ours.rpartition(".")[0].partition(".")[0]

    def read(draft: Draft) -> None:
        if layer == "moe" and draft.sparse and not any(draft.sparse):
            return
        if isinstance(default, bool):
            draft.put(ours, words[flag(draft.settings, official, default)])
        elif isinstance(default, float):
            draft.put(ours, number(draft.settings, official, default))
        else:
            draft.put(ours, count(draft.settings, official, default))

    def write(model: Written) -> dict[str, Any]:
        if layer in ("feed_forward", "moe") and not model.numbers(layer):
            return {}
        found = _setting(model, ours)
        if isinstance(default, bool):
            found = found == words[True]
        elif isinstance(default, float) and found is not None:
            found = float(found)  # ours may be an integer, which transformers does not accept
        return {official: found}

    return Rule(official, read, write)


def _setting(model: Written, place: str) -> Any:
    """The setting of a model of ours in a place; ``None`` if a value has no such setting."""
    layer, *keywords = place.split(".")
    if not keywords:
        return getattr(model.config, layer)
    own = model.first(*(("attention", "sliding_attention") if layer == "attention" else (layer,)))
    keyword, *name = keywords
    found = own[keyword] if keyword in own else model.first(layer)[keyword]
    return getattr(found, name[0], None) if name else found


def several(layer: str, table: str) -> tuple[Rule, ...]:
    """Fields that are keywords of a kind of layer.

    Args:
        layer: The kind; empty for settings of the model.
        table: Of each field THEIRS=OURS:DEFAULT, separated by spaces, or THEIRS:DEFAULT where the
            names are equal.

    Example:
        >>> [rule.official for rule in several("mamba2", "n_groups:8 conv_kernel=d_conv:4")]
        ['n_groups', 'conv_kernel']
    """
    names = (entry.partition(":") for entry in table.split())
    pairs = ((*place.partition("=")[::2], literal_eval(default)) for place, _, default in names)
    prefix = layer and f"{layer}."
    return tuple(
        field(official, prefix + (ours or official), value) for official, ours, value in pairs
    )


_INERT = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation_internal _model_name_or_path _name_or_path architectures
    attn_implementation auto_map
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
    "add_cross_attention": (False, None),
    "chunk_size_feed_forward": (0, None),
    "cross_attention_hidden_size": (None,),
    "is_causal": (True,),  # null is false to transformers
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False, None),
    "tie_encoder_decoder": (False, None),
}
"""Supported values of fields that any family may have."""


_LONGEST = "max_position_embeddings"
"""The longest text of the training, which has no effect on the logits in most families."""


class Fields(NamedTuple):
    """The fields of a family's ``config.json``; any other field is an error.

    Attributes:
        rules: Fields with a counterpart among our settings. A rule that says which layers have
            experts stands before the fields of the experts.
        only: Supported values of a field; the default of transformers is the first.
        inert: Names of fields without effect on the logits, besides ``INERT``.
        fixed: Settings that all models of the family have: names, or LAYER.KEYWORD. Norms are
            ``rms`` unless ``norm`` says otherwise.
        depth: The field with the number of layers; empty if a list of layers has this number.
    """

    rules: tuple[Rule, ...]
    only: Mapping[str, tuple[Any, ...]] = {}
    inert: str = ""
    fixed: Mapping[str, Any] = {}
    depth: str = "num_hidden_layers"

    def read(self, settings: Settings) -> Draft:
        """Our settings; InputError if a field is missing, unknown, or of an unsupported value."""
        self._check(settings)
        draft = Draft(settings)
        for rule in self.rules:
            rule.read(draft)
        for place, value in self.fixed.items():
            draft.put(place, value)
        if settings.get(_LONGEST) is not None and "max_len" not in draft.model:
            draft.put("trained_len", count(settings, _LONGEST))
        return draft

    def config(self, settings: Settings, names: Names) -> ModelConfig:
        """Our configuration of a model; a field that is missing has the value of transformers."""
        draft = self.read(settings)
        n = layer_count(draft.settings, self.depth) if self.depth else len(draft.mixers)
        mixers = draft.mixers or [*names.mixers[:1]] * n
        layers = draft.layers
        draft.spell()
        if "sliding_attention" in mixers:
            own = {**layers["attention"], **layers["sliding_attention"]}
            if str(own.get("qk_norm")).startswith("joint"):
                raise InputError(
                    "sliding windows with heads that are normalised together are not supported"
                )
            layers["sliding_attention"] = own
        model: dict[str, Any] = {"pattern": runs(mixers)}
        if len(names.norms) > 1:
            model = _with_feed_forwards(draft, mixers)
        model |= {"norm": "rms", **draft.model}
        end = {"moe": "moe", "none": ""}.get(model.get("feed_forward", ""), "feed_forward")
        used = {*re.findall(r"\w+", model["pattern"]), end}
        return ModelConfig(
            **model, layers={name: own for name, own in layers.items() if name in used}
        )

    def settings(self, config: ModelConfig, names: Names) -> dict[str, Any]:
        """The inverse of :meth:`config`; InputError if the family has no such model."""
        return self.write(groups(config, names))

    def write(self, model: Written) -> dict[str, Any]:
        """The inverse of :meth:`read`."""
        settings = {name: known[0] for name, known in self.only.items()}
        settings |= {self.depth: len(model.blocks)} if self.depth else {}
        if model.config.trained_len is not None and _LONGEST in self._accounted():
            settings[_LONGEST] = model.config.trained_len
        for rule in self.rules:
            settings |= rule.write(model)
        return settings

    def _accounted(self) -> set[str]:
        """Names of the fields that are read, or have no effect."""
        named = {name for rule in self.rules for name in rule.official.split()}
        return {*INERT, *self.inert.split(), self.depth, *named}

    def _check(self, settings: Settings) -> None:
        accounted = self._accounted()
        only = {**ONLY, **self.only}
        for name, value in settings.items():
            if name in accounted:
                continue
            if name not in only and value is not None:
                raise InputError(
                    f"{name}={value!r:.80} has no counterpart here: if it has no effect on the "
                    f"model, convert it with --settings '{{\"{name}\": null}}'"
                )
            if name in only and value not in only[name]:
                known = " or ".join(repr(word) for word in only[name])
                raise InputError(f"{name}={value!r:.80} is not supported, only {known} is")


def _with_feed_forwards(draft: Draft, mixers: Sequence[str]) -> dict[str, Any]:
    """The pattern of mixers that are each followed by a feed-forward, and the kind of these."""
    gate, sparse = draft.model.pop("feed_forward", "swiglu"), draft.sparse or [False] * len(mixers)
    mixed = len(set(sparse)) > 1
    names: list[str] = []
    for mixer, experts in zip(mixers, sparse, strict=True):
        names.append(mixer)
        if mixed or (mixer in LAYERS and not LAYERS[mixer].wants_feed_forward):
            names.append("moe" if experts else "feed_forward")
    if "feed_forward" in names:
        draft.put("feed_forward.activation", gate)
    kind = "none" if mixed else "moe" if sparse[0] else gate
    return {"pattern": runs(names), "feed_forward": kind}


VOCABULARY = field("vocab_size", "vocab_size")
WIDTH = field("hidden_size", "d_model")
ENDS, TIED = (
    (VOCABULARY, WIDTH, field("tie_word_embeddings", "tie_embeddings", default))
    for default in (False, True)
)
UNTIED = (
    *ENDS[:2],
    Rule(  # transformers ignores the field in these families
        "tie_word_embeddings",
        lambda draft: draft.put("tie_embeddings", False),
        lambda _: {"tie_word_embeddings": False},
    ),
)
BIAS = field("attention_bias", "attention.bias", False)
SILU = {"hidden_act": ("silu",)}


def hidden(default: int | None = None) -> Rule:
    """The hidden width of feed-forwards."""
    return field("intermediate_size", "feed_forward.d_hidden", default)


GATED = (*ENDS, hidden())


def norms(default: float, *layers: str) -> tuple[Rule, ...]:
    """The epsilon of the norms of the blocks, and of the norms in some kinds of layers."""
    inner = {"attention": "attention.qk_norm.eps"}
    places = ("norm_eps", *(inner.get(layer, f"{layer}.norm_eps") for layer in layers))
    return tuple(field("rms_norm_eps", place, default) for place in places)


def heads(kv_default: int | None = None, width: int | None = None) -> Rule:
    """Numbers of heads of attention and their width.

    Args:
        kv_default: Number of key heads if the field is missing; ``None``: as many as query heads.
        width: Width of a head if the field is missing; ``None``: hidden size / heads.
    """
    ours = {"num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
    ours |= {"head_dim": "d_head"}

    def read(draft: Draft) -> None:
        if width is not None:
            draft.settings = {"head_dim": width, **draft.settings}
        settings = draft.settings
        n_heads = n_kv_heads = count(settings, "num_attention_heads")
        default = kv_default or n_heads
        if settings.get("num_key_value_heads", default) is not None:
            n_kv_heads = count(settings, "num_key_value_heads", default)
        draft.put("attention.n_heads", n_heads)
        if n_kv_heads != n_heads:
            draft.put("attention.n_kv_heads", n_kv_heads)
        if settings.get("head_dim") not in (None, count(settings, "hidden_size") / n_heads):
            draft.put("attention.d_head", count(settings, "head_dim"))

    def write(model: Written) -> dict[str, Any]:
        attention = model.first("attention", "sliding_attention")
        return {official: attention[name] for official, name in ours.items()}

    return Rule(" ".join(ours), read, write)


def head_width(settings: Settings) -> int:
    """Width of a head."""
    usual = count(settings, "hidden_size") // count(settings, "num_attention_heads")
    return usual if settings.get("head_dim") is None else count(settings, "head_dim")


ROPE = "rope_theta rope_scaling rope_parameters max_position_embeddings"
PARTIAL = f"{ROPE} partial_rotary_factor"
"""Fields of rotary positions of all entries of a head, and of a part of them."""


def rope(base: float = 10_000.0, fraction: float | None = None) -> Rule:
    """Rotary positions of attention, as :func:`rope_keywords` reads them."""

    def read(draft: Draft) -> None:
        keywords = rope_keywords(draft.settings, base=base, fraction=fraction)
        draft.layers["attention"].update(keywords)

    def write(model: Written) -> dict[str, Any]:
        return rope_back(model.first("attention", "sliding_attention"))

    return Rule(ROPE if fraction is None else PARTIAL, read, write)


def rope_keywords(
    settings: Settings, *, base: float = 10_000.0, fraction: float | None = None
) -> dict[str, Value]:
    """Rotary positions; newer files have ``rope_parameters``, older ones single fields.

    As in transformers, ``rope_scaling`` replaces ``rope_parameters``, and single fields count if
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
    own: dict[str, Any] = {"base": number(given, "rope_theta", base)}
    if (part := number(given, "partial_rotary_factor", 1.0)) != 1:
        own["fraction"] = part
        if fraction is None:
            raise InputError(f"partial_rotary_factor={part} is not supported in this family")
        d_head = head_width(settings)
        if not 0 < part < 1 or int(d_head * part) % 2:
            raise InputError(
                f"rotary positions rotate pairs of entries, got {d_head * part:g} of {d_head}"
            )
    if str(kind) not in _SCALINGS:
        raise InputError(
            f"rotary positions scaled by {kind!r} are not supported: only 'linear', 'llama3' and "
            "'yarn' are"
        )
    scaling: dict[str, Value] = {}
    for official, (ours, default) in _SCALINGS[kind].items():
        read: Callable[..., Value] = count if default is None else number
        scaling[ours] = read(given, official, default)
    if kind == "yarn":
        scaling["truncate"] = flag(given, "truncate", True)
        scaling["attention_factor"] = _attention_factor(given)
    if kind != "default":
        own["scaling"] = format_value(kind, scaling)
    return {"position": str(Rope(**own))}


def _attention_factor(given: Settings) -> float | None:
    """YaRN's factor of rotated queries and keys; ``None`` is the default."""
    if given.get("attention_factor") is not None:
        return number(given, "attention_factor", 1.0)
    if not (given.get("mscale") and given.get("mscale_all_dim")):
        return None
    factor, over, under = (number(given, n, 1.0) for n in ("factor", "mscale", "mscale_all_dim"))
    at_least(0, mscale=over, mscale_all_dim=under)
    return yarn_factor(factor, over) / yarn_factor(factor, under)


_FACTOR = {"factor": ("factor", 1.0)}
_SCALINGS: Mapping[str, Mapping[str, tuple[str, float | None]]] = {
    "default": {},
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        "low_freq_factor": ("low", 1.0),
        "high_freq_factor": ("high", 4.0),
        "original_max_position_embeddings": ("original_len", None),
    },
    "yarn": {
        **_FACTOR,
        "beta_slow": ("slow", 1.0),
        "beta_fast": ("fast", 32.0),
        "original_max_position_embeddings": ("original_len", None),
    },
}
"""Parameters of scaled frequencies: our keywords, and defaults."""
_ROPE = {
    *_SCALINGS["llama3"],
    *_SCALINGS["yarn"],
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "mrope_interleaved",  # of images; the positions of text are the same on all its axes
    "mrope_section",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "type",
}
"""Parameters of rotary positions that are read, or have no effect."""


def rope_back(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`rope_keywords`, as transformers 5 writes it; empty without these."""
    own = keywords["position"]
    if not isinstance(own, Rope):
        return {}
    kind = "default" if own.scaling == "none" else own.scaling.owner
    parameters = {
        "rope_type": kind,
        "rope_theta": own.base,
        "partial_rotary_factor": own.fraction,
    }
    scaling = {new: getattr(own.scaling, ours) for new, (ours, _) in _SCALINGS[kind].items()}
    if isinstance(own.scaling, Yarn):
        scaling["truncate"] = own.scaling.truncate
        if own.scaling.attention_factor is not None:
            scaling["attention_factor"] = own.scaling.attention_factor
    return {"rope_parameters": parameters | scaling}


def kinds(
    words: Mapping[str, str],
    derived: Callable[[Draft], Sequence[str]],
    *,
    names: str = "layer_types",
    others: str = "",
) -> Rule:
    """The mixer of each layer.

    Args:
        words: Our name of each official word.
        derived: The official words if the field is missing.
        names: Names of the field, separated by spaces; the last of them is written.
        others: Names of fields that ``derived`` reads.
    """

    def read(draft: Draft) -> None:
        found = layer_types(draft.settings, names, tuple(words)) or derived(draft)
        draft.mixers = [words[word] for word in found]

    def write(model: Written) -> dict[str, Any]:
        back = {ours: word for word, ours in reversed([*words.items()])}
        return {names.split()[-1]: [back[block[0].name] for block in model.blocks]}

    return Rule(f"{names} {others}", read, write)
