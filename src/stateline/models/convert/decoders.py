"""Llama and its relatives: rotary attention and gated feed-forwards, some of them with experts."""

from functools import partial
from typing import Any

from stateline.errors import InputError
from stateline.layers.mixers.moe import Expert
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.fields import Draft, Fields, Rule, field
from stateline.models.convert.parts import Experts, Names, Written
from stateline.models.convert.weights import count, flag, number

NAMES = Names(
    embedding="model.embed_tokens",
    mixers=("attention", "sliding_attention"),
    base="model.",
    norm="model.norm",
    layer="model.layers.{}.",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
)
EXPERTS = Experts(
    "mlp.gate",
    ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.{}.down_proj",
    (("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), "mlp.shared_expert.down_proj"),
    "mlp.shared_expert_gate",
    whole=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
MIXTRAL = Experts(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)
GRANITE = Experts(
    "block_sparse_moe.router.layer",
    ("block_sparse_moe.input_linear",),
    "block_sparse_moe.output_linear",
    (("shared_mlp.input_linear",), "shared_mlp.output_linear"),
)
LOSS = "output_router_logits router_aux_loss_coef"
"""Fields of the loss that balances experts."""


def _read_scores(draft: Draft) -> None:
    scale = number(draft.settings, "attention_multiplier", 1.0)
    if scale != max(1, fields.head_width(draft.settings)) ** -0.5:
        draft.put("attention.score_scale", scale)


def _write_scores(model: Written) -> dict[str, float]:
    attention = model.first("attention")
    return {"attention_multiplier": attention["score_scale"] or attention["d_head"] ** -0.5}


MULTIPLIERS = (
    *fields.several(
        "", "embedding_multiplier:1.0 residual_multiplier:1.0 logits_scaling=logits_divisor:1.0"
    ),
    Rule("attention_multiplier", _read_scores, _write_scores),
)
"""Granite's."""


def _read_windows(draft: Draft, *, used: bool, first: float) -> None:
    """The kind of each layer, and the window of sliding ones.

    Args:
        draft: The configuration.
        used: Whether windows are used, if no field says so.
        first: The first sliding layer, if no field says so.
    """
    settings, words, window = draft.settings, fields.SLIDING, None
    if flag(settings, "use_sliding_window", used):
        window = _window(draft, 4096)
    start = number(settings, "max_window_layers", first)
    types = fields.layer_types(settings, "layer_types", tuple(words))
    if types is None:
        sliding = "full_attention" if window is None else "sliding_attention"
        depth = range(fields.layer_count(settings))
        types = [sliding if i >= start else "full_attention" for i in depth]
    if window is None and "sliding_attention" in types:
        raise InputError("layer_types has sliding_attention, but no sliding_window is used")
    draft.mixers = [words[word] for word in types]
    draft.put("sliding_attention.window", window)


def _window(draft: Draft, default: int | None) -> int | None:
    """The window; ``None`` where it is null."""
    given = draft.settings.get("sliding_window", default)
    return None if given is None else count(draft.settings, "sliding_window", default)


def _written(model: Written) -> tuple[list[str], int | None]:
    """The kinds of the layers, and the window of sliding ones."""
    mixers = [block[0] for block in model.blocks]
    windows = [mixer.keywords["window"] for mixer in mixers if mixer.name == "sliding_attention"]
    types = ["full_attention" if mixer.name == "attention" else mixer.name for mixer in mixers]
    return types, windows[0] if windows else None


def _write_mistral(model: Written) -> dict[str, Any]:
    types, window = _written(model)
    # transformers takes a Mistral with layer types as a Ministral
    mixed = {"model_type": "ministral", "layer_types": types} if len(set(types)) > 1 else {}
    return {"sliding_window": window, **mixed}


def _write_qwen(model: Written) -> dict[str, Any]:
    types, window = _written(model)
    used = {"use_sliding_window": window is not None, "sliding_window": window}
    return {**used, "layer_types": types}


_MISTRAL = Rule(
    "layer_types sliding_window",
    partial(_read_windows, used=True, first=0),
    _write_mistral,
)
_QWEN = Rule(
    "layer_types sliding_window use_sliding_window max_window_layers",
    partial(_read_windows, used=False, first=28),
    _write_qwen,
)


def some_sparse(
    n: int, top_k: int, width: int, *, normalise: bool = False, newer: str = "num_experts"
) -> tuple[Rule, ...]:
    """Fields of families in which some layers have experts, with their defaults.

    Args:
        n: Number of experts.
        top_k: How many of them a token uses.
        width: Their hidden width.
        normalise: Whether the weights of these add up to one.
        newer: Another name of the number of experts, which may stand beside it.
    """

    def read(draft: Draft) -> None:
        settings, step = draft.settings, count(draft.settings, "decoder_sparse_step", 1)
        depth = fields.layer_count(settings)
        dense = fields.layer_indices(settings, "mlp_only_layers") or []
        name = newer if newer in settings else "num_experts"
        experts = count(settings, name, n, least=0)
        fields.agree(settings, num_experts=experts)
        draft.put("moe.experts", experts)
        places = ((i + 1) % step == 0 and i not in dense for i in range(depth))
        draft.sparse = [experts > 0 and place for place in places]

    def write(model: Written) -> dict[str, Any]:
        sparse = model.numbers("moe")
        return {
            "num_experts": model.first("moe")["experts"] if sparse else 0,
            "mlp_only_layers": sorted({*range(len(model.blocks))} - {*sparse}),
        }

    return (
        Rule(f"num_experts {newer} mlp_only_layers decoder_sparse_step", read, write),
        field("num_experts_per_tok", "moe.top_k", top_k),
        field("moe_intermediate_size", "moe.d_hidden", width),
        field("norm_topk_prob", "moe.normalise", normalise),
    )


def all_sparse(
    n: int,
    top_k: int,
    width: int | None = None,
    *,
    name: str = "num_experts",
    width_name: str = "intermediate_size",
) -> tuple[Rule, ...]:
    """Fields of families whose layers all have experts, with their defaults."""

    def read(draft: Draft) -> None:
        draft.sparse = [True] * fields.layer_count(draft.settings)

    def write(model: Written) -> dict[str, Any]:
        if len(model.numbers("moe")) < len(model.blocks):
            raise InputError(
                f"models of this family have experts in all layers, got {model.config.pattern}"
            )
        return {}

    return (
        Rule("", read, write),
        field(name, "moe.experts", n),
        field("num_experts_per_tok", "moe.top_k", top_k),
        field(width_name, "moe.d_hidden", width),
    )


def shared_expert(
    width: int, official: str = "shared_expert_intermediate_size", *, gate: bool = True
) -> Rule:
    """The field of the width of an expert that all tokens use.

    Args:
        width: The width if the field is missing.
        official: Its name.
        gate: Whether its output is gated.
    """

    def read(draft: Draft) -> None:
        if any(draft.sparse or [True]):
            expert = Expert(d_hidden=count(draft.settings, official, width), gate=gate)
            draft.put("moe.shared", str(expert))

    def write(model: Written) -> dict[str, Any]:
        return {official: model.first("moe")["d_shared"]} if model.numbers("moe") else {}

    return Rule(official, read, write)


def _read_mixtral(draft: Draft) -> None:
    if (window := _window(draft, None)) is not None:
        draft.mixers = ["sliding_attention"] * fields.layer_count(draft.settings)
        draft.put("sliding_attention.window", window)


def _write_mixtral(model: Written) -> dict[str, Any]:
    return {"sliding_window": model.first(*NAMES.mixers).get("window")}


def _read_exaone(draft: Draft) -> None:
    """With windows, only sliding layers rotate queries and keys."""
    settings, depth = draft.settings, range(fields.layer_count(draft.settings))
    window, rope = _window(draft, 4096), fields.rope_keywords(draft.settings)
    types = fields.layer_types(settings, "layer_types", tuple(fields.SLIDING))
    if types is None:
        every = 1 if window is None else count(settings, "sliding_window_pattern", 4)
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in depth]
    if window is None and "sliding_attention" in types:
        raise InputError("layer_types has sliding_attention, but sliding_window is null")
    draft.mixers = [fields.SLIDING[word] for word in types]
    draft.put("sliding_attention.window", window)
    draft.layers["attention" if window is None else "sliding_attention"].update(rope)


def _write_exaone(model: Written) -> dict[str, Any]:
    types, window = _written(model)
    attention = model.first(*NAMES.mixers[:: 1 if window is None else -1])
    unrotated = window is None and attention["position"] == "none"
    rope = fields.rope_back(attention)
    return {"layer_types": types, "sliding_window": 4096 if unrotated else window, **rope}


def _check_full(draft: Draft) -> None:
    fields.layer_types(draft.settings, "layer_types", tuple(fields.FULL))


_LLAMA = (
    *fields.GATED,
    *fields.norms(1e-6),
    fields.BIAS,
    field("mlp_bias", "feed_forward.bias", False),
    fields.heads(),
    fields.rope(),
)
_AFTER = NAMES._replace(norms_after=("post_attention_layernorm", "post_feedforward_layernorm"))
_FEW = {**fields.SILU, "use_sliding_window": (False,)}
_UNUSED = f"{LOSS} sliding_window max_window_layers"
_FIELDS = {
    "llama": Fields(_LLAMA, fields.SILU),
    "mistral": Fields(
        (*fields.GATED, *fields.norms(1e-6), fields.heads(8), fields.rope(), _MISTRAL),
        fields.SILU,
    ),
    "qwen2": Fields(
        (*fields.GATED, *fields.norms(1e-6), fields.heads(32), fields.rope(), _QWEN),
        fields.SILU,
        fixed={"attention.bias": "qkv"},
    ),
    "qwen3": Fields(
        (
            *fields.GATED,
            *fields.norms(1e-6, "attention"),
            fields.BIAS,
            fields.heads(32, 128),
            fields.rope(),
            _QWEN,
        ),
        fields.SILU,
        fixed={"attention.qk_norm": "rms"},
    ),
    "olmo2": Fields(
        (
            *fields.GATED,
            *fields.norms(1e-5, "attention"),
            fields.BIAS,
            fields.heads(),
            fields.rope(),
        ),
        fields.SILU,
        fixed={"norm_after": "attention", "attention.qk_norm": "joint"},
    ),
    "exaone4": Fields(
        (
            *fields.GATED,
            *fields.norms(1e-5, "attention"),
            fields.heads(32),
            Rule(
                f"layer_types sliding_window sliding_window_pattern {fields.ROPE}",
                _read_exaone,
                _write_exaone,
            ),
        ),
        fields.SILU,
        fixed={"norm_after": "attention sliding_attention", "attention.qk_norm": "rms"},
    ),
    "granite": Fields((*_LLAMA, *MULTIPLIERS), fields.SILU),
    "mixtral": Fields(
        (
            *fields.ENDS,
            *fields.norms(1e-5),
            *all_sparse(8, 2, name="num_local_experts"),
            fields.heads(8),
            fields.rope(1e6),
            Rule("sliding_window", _read_mixtral, _write_mixtral),
        ),
        fields.SILU,
        f"{LOSS} router_jitter_noise",
    ),
    "qwen2_moe": Fields(
        (
            *fields.ENDS,
            *fields.norms(1e-6),
            fields.hidden(5632),
            *some_sparse(60, 4, 1408),
            shared_expert(5632),
            fields.heads(16),
            fields.rope(),
            field("qkv_bias", "attention.bias", True, {True: "qkv", False: False}),
            Rule("layer_types", _check_full),
        ),
        _FEW,
        _UNUSED,
    ),
    "qwen3_moe": Fields(
        (
            *fields.ENDS,
            *fields.norms(1e-6, "attention"),
            fields.BIAS,
            fields.hidden(6144),
            *some_sparse(128, 8, 768, newer="num_local_experts"),
            fields.heads(4),
            fields.rope(),
        ),
        _FEW,
        _UNUSED,
        {"attention.qk_norm": "rms"},
    ),
    "olmoe": Fields(
        (
            *fields.ENDS,
            *fields.norms(1e-5, "attention"),
            fields.BIAS,
            *all_sparse(64, 8),
            field("norm_topk_prob", "moe.normalise", False),
            fields.heads(),
            fields.rope(),
        ),
        {**fields.SILU, "clip_qkv": (None,)},
        LOSS,
        {"attention.qk_norm": "joint"},
    ),
    "granitemoe": Fields(
        (
            *fields.ENDS,
            *fields.norms(1e-6),
            fields.BIAS,
            *all_sparse(8, 2, name="num_local_experts"),
            fields.heads(),
            fields.rope(),
            *MULTIPLIERS,
        ),
        fields.SILU,
        LOSS,
    ),
}


def _family(kind: str, architecture: str, experts: Experts | None = None, **others: str) -> Any:
    return family(NAMES._replace(experts=experts), _FIELDS[kind], **{kind: architecture, **others})


CONVERTERS = {
    "llama": _family("llama", "LlamaForCausalLM"),
    "mistral": _family("mistral", "MistralForCausalLM", ministral="MinistralForCausalLM"),
    "qwen2": _family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _family("qwen3", "Qwen3ForCausalLM"),
    "olmo2": family(_AFTER, _FIELDS["olmo2"], olmo2="Olmo2ForCausalLM"),
    "exaone4": family(_AFTER, _FIELDS["exaone4"], exaone4="Exaone4ForCausalLM"),
    "granite": _family("granite", "GraniteForCausalLM"),
    "mixtral": _family("mixtral", "MixtralForCausalLM", MIXTRAL),
    "qwen2_moe": _family("qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS),
    "qwen3_moe": _family("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS),
    "olmoe": _family("olmoe", "OlmoeForCausalLM", EXPERTS),
    "granitemoe": _family("granitemoe", "GraniteMoeForCausalLM", GRANITE),
}
"""By ``model_type``."""
