"""GPT-NeoX and Pythia, and the models of "Repeat After Me", which are built on GPT-NeoX."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from stateline.errors import InputError, unknown_name
from stateline.layers.mixers.heads import PLAIN_ROPE, Rope
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Shapes, family
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.fields import Draft, Fields, Rule, Settings, field
from stateline.models.convert.parts import Change, Names, Part, Place, Written, groups, renamed
from stateline.models.convert.weights import count, number
from stateline.pattern import format_value, parse_pattern

ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
"""Our name of each official activation."""

NAMES = Names(
    embedding="gpt_neox.embed_in",
    mixers=("attention",),
    base="gpt_neox.",
    norm="gpt_neox.final_layer_norm",
    layer="gpt_neox.layers.{}.",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("attention.query_key_value",),
    by_head=True,
    out="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    blocks=("parallel", "sequential"),
    head="embed_out",
    spell=renamed("lm_head.weight", "embed_out.weight"),  # its name in newer files
)


def activation(settings: Settings, name: str, default: str) -> Any:
    """Our name of the activation.

    Raises:
        InputError: If we do not have it.
    """
    if (official := str(settings.get(name, default))) not in ACTIVATIONS:
        raise unknown_name("activation", official, ACTIVATIONS)
    return ACTIVATIONS[official]


def activation_back(config: ModelConfig) -> str:
    """The inverse of :func:`activation`; InputError if the activation is not among them."""
    for official, ours in ACTIVATIONS.items():
        if ours == config.feed_forward:
            return official
    raise InputError(
        "models of this family have feed-forwards without gates, got "
        f"feed_forward={config.feed_forward}"
    )


def _read(draft: Draft) -> None:
    settings = draft.settings
    draft.put("feed_forward", activation(settings, "hidden_act", "gelu"))
    if settings.get("position", "rope") == "rope":
        older = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
        newer = {new: number(settings, old, 0) for old, new in older.items() if old in settings}
        rope = fields.rope_keywords({**settings, **newer}, fraction=0.25)
        draft.layers["attention"] |= rope
    else:
        position, masked = str(settings["position"]), settings.get("masked_heads")
        given = position == "hard_alibi" and masked is not None
        own = {"masked_heads": count(settings, "masked_heads", least=0)} if given else {}
        draft.put("attention.position", format_value(position, own))


def _write(model: Written) -> dict[str, Any]:
    attention = model.first("attention")
    rope = attention["position"] if isinstance(attention["position"], Rope) else PLAIN_ROPE
    return {
        "rotary_pct": rope.fraction,  # versions 4 read these two
        "rotary_emb_base": rope.base,
        **fields.rope_back(attention),
        "hidden_act": activation_back(model.config),
    }


_FIELDS = Fields(
    (
        *fields.GATED,
        field("layer_norm_eps", "norm_eps", 1e-5),
        field("num_attention_heads", "attention.n_heads"),
        field("attention_bias", "attention.bias", True),
        field("use_parallel_residual", "block", True, {True: "parallel", False: "sequential"}),
        Rule(
            "hidden_act rotary_pct rotary_emb_base rope_scaling "
            "rope_parameters max_position_embeddings position masked_heads",
            _read,
            _write,
        ),
    ),
    fixed={"norm": "layer"},
)


def gpt_neox_config(settings: Settings) -> ModelConfig:
    """Our configuration of a GPT-NeoX model, or of one of Repeat After Me.

    A model has no ``max_len``: longer inputs than in training are accepted, and quality depends on
    how rotary positions extrapolate.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it. The models of Repeat After Me also have ``position`` (``none``,
            ``alibi``, ``hard_alibi``, or ``rope``, which is GPT-NeoX itself) and
            ``masked_heads``; their settings of rotary positions are ignored.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    References:
        Black et al., "GPT-NeoX-20B", 2022; Biderman et al., "Pythia", 2023; Jelassi et al., "Repeat
        After Me", ICML 2024, section 2.2 and appendix A.

    Example:
        >>> config = gpt_neox_config({
        ...     "vocab_size": 64, "hidden_size": 32, "intermediate_size": 128,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4})
        >>> config.pattern, config.block, config.layers["attention"]["position"]
        ('attention*2', 'parallel', 'rope(fraction=0.25)')
    """
    return _FIELDS.config(settings, NAMES)


def _repeat_after_me_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model of Repeat After Me, which may have other positions."""
    model = groups(config, NAMES)
    position = model.first("attention")["position"]
    masked = getattr(position, "masked_heads", None)
    position = getattr(position, "owner", position)
    return _FIELDS.write(model) | {"position": position, "masked_heads": masked}


def _repeat_after_me_parts(config: ModelConfig, _: Settings) -> list[Part]:
    r"""The tensors of a GPT-NeoX; queries may have another size.

    Without rotary positions, all but the first quarter of a head's entries count twice in the
    official score, :math:`(q \cdot k + q_{r:} \cdot k_{r:}) / \sqrt d` with
    :math:`r = \lfloor d / 4 \rfloor`. The paper does not mention this. Here, these entries of q are
    twice as large instead, which gives the same scores up to rounding.
    """
    parts, attention = decoder_parts(config, NAMES), groups(config, NAMES).first("attention")
    if isinstance(attention["position"], Rope):
        return parts
    heads = attention["n_heads"], attention["d_head"]
    twice = Change(partial(_multiplied, heads, 2.0), partial(_multiplied, heads, 0.5))
    return [part._replace(joined=twice) if ".qkv." in part.ours else part for part in parts]


def _multiplied(heads: tuple[int, int], factor: float, rows: Tensor) -> Tensor:
    """Rows of a joint projection; all but the first quarter of each query have a factor."""
    n_heads, d_head = heads
    rows = rows.clone()
    rows[: n_heads * d_head].unflatten(0, heads)[:, d_head // 4 :] *= factor
    return rows


def lstm_config(settings: Settings) -> ModelConfig:
    """Our configuration of the LSTM of Repeat After Me: no norms, no residual branches."""
    # Differs from the official code, which applies dropout of 65 % between LSTM layers in
    # training: there is no dropout here.
    return ModelConfig(
        f"lstm(n_layers={count(settings, 'n_layers')})",
        vocab_size=count(settings, "vocab_size"),
        d_model=count(settings, "d_model"),
        block="plain",
        norm="none",
        tie_embeddings=False,
        head_bias=True,
    )


def _lstm_shapes(shapes: Shapes) -> dict[str, Any]:
    if len(shape := shapes["word_embeddings.weight"]) != 2:
        raise InputError(f"word_embeddings.weight must be a matrix, got the shape {shape}")
    n_layers = sum(name.startswith("lstm.weight_hh_l") for name in shapes)
    return {"vocab_size": shape[0], "d_model": shape[1], "n_layers": n_layers}


def _lstm_parts(config: ModelConfig, _: Settings) -> list[Part]:
    (item, *others) = parse_pattern(config.pattern)
    if others or item.name != "lstm" or config.block != "plain":
        raise InputError(
            "the LSTM of Repeat After Me is lstm(n_layers=...) in a plain block, without norms, "
            f"got {config.pattern!r}"
        )
    parts = Place().same("embedding.weight:word_embeddings.weight head.*")
    for layer in range(int(str(item.keywords.get("n_layers", 1)))):
        names = f"weight_ih_l{layer} weight_hh_l{layer} bias_ih_l{layer} bias_hh_l{layer}"
        parts += Place("lstm.", "stack.layers.0.").same(names)
    return parts


CONVERTERS: Mapping[str, Converter] = {
    "repeat_after_me": Converter(
        NAMES,
        gpt_neox_config,
        _repeat_after_me_settings,
        recognise=lambda settings, tensors: (
            "position" in settings and any("query_key_value" in name for name in tensors)
        ),
        parts=_repeat_after_me_parts,
    ),
    "repeat_after_me_lstm": Converter(
        Names(embedding="word_embeddings", head="head"),
        lstm_config,
        lambda config: {},  # noqa: ARG005 (all follows from the shapes)
        recognise=lambda _, tensors: (
            {"word_embeddings.weight", "lstm.weight_hh_l0"} <= set(tensors)
        ),
        parts=_lstm_parts,
        read_off=_lstm_shapes,
    ),
    "gpt_neox": family(NAMES, _FIELDS, gpt_neox="GPTNeoXForCausalLM"),
}
"""By name of the format."""
