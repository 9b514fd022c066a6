"""xLSTM as it is in transformers: mLSTM layers, each followed by a feed-forward."""

from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.parts import Names, first_keywords, groups
from stateline.models.convert.weights import count, number

NAMES = Names(
    embedding="backbone.embeddings",
    mixers=("mlstm",),
    base="backbone.",
    norm="backbone.out_norm",
    layer="backbone.blocks.{}.",
    norms=("norm_mlstm", "norm_ffn"),
    up=("ffn.proj_up_gate", "ffn.proj_up"),
    down="ffn.proj_down",
    inner="mlstm_layer.",
)
_EPS = fields.Field("norm_eps", "norm_eps", 1e-6)
FIELDS = fields.Fields(
    (
        fields.VOCABULARY,
        fields.WIDTH,
        _EPS,
        _EPS._replace(ours="mlstm.norm_eps"),
        fields.Field("num_heads", "mlstm.n_heads", 8),
        fields.Field("gate_soft_cap", "mlstm.soft_cap", 15.0),
        fields.Field("eps", "mlstm.divisor_eps", 1e-6),
        fields.Field("output_logit_soft_cap", "logits_soft_cap", 30.0),
    ),
    "embedding_dim ffn_proj_factor ffn_round_up_to_multiple_of num_blocks qk_dim_factor "
    "v_dim_factor",
    {
        "add_out_norm": (True,),
        "inference_state_dtype": ("float32",),
        "mode": ("inference",),
        "use_bias": (False,),
        "weight_mode": ("single",),
    },
    # which kernels compute it, in which pieces
    "autocast_kernel_dtype chunk_size chunkwise_kernel head_dim max_inference_chunksize "
    "norm_reduction_force_float32 return_last_states sequence_kernel step_kernel "
    "tie_word_embeddings",
)


def xlstm_config(settings: Settings) -> ModelConfig:
    """Our configuration of an xLSTM."""
    settings = {"hidden_size": 4096, "num_hidden_layers": 32, **settings}
    model, layers = FIELDS.read(settings)
    width, n = model["d_model"], fields.layer_count(settings)
    for name, wanted in (("embedding_dim", width), ("num_blocks", n)):
        if settings.get(name, wanted) not in (None, wanted):
            raise InputError(f"{name} must be {wanted} or missing, got {settings[name]!r:.20}")
    for ours, theirs, default in (
        ("expand_k", "qk_dim_factor", 0.5),
        ("expand_v", "v_dim_factor", 1.0),
    ):
        layers["mlstm"][ours] = int(width * _factor(settings, theirs, default)) / width
    multiple = count(settings, "ffn_round_up_to_multiple_of", 64)
    hidden = width * _factor(settings, "ffn_proj_factor", 2.667)
    layers["feed_forward"] = {"d_hidden": int((hidden + multiple - 1) // multiple) * multiple}
    found = fields.composed(["mlstm"] * n, [False] * n, layers)
    # transformers ignores tie_word_embeddings in this family
    return ModelConfig(**found, norm="rms", tie_embeddings=False, **model)


def _factor(settings: Settings, name: str, default: float) -> float:
    if not 0 < (factor := number(settings, name, default)) < 1e6:
        raise InputError(f"{name} must be positive and below a million, got {factor}")
    return factor


def xlstm_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`xlstm_config`."""
    blocks = groups(config, NAMES)
    mlstm, hidden = first_keywords(blocks, "mlstm"), blocks[0][1].keywords["d_hidden"]
    return {
        **FIELDS.write(config, blocks),
        "tie_word_embeddings": False,
        "qk_dim_factor": mlstm["expand_k"],
        "v_dim_factor": mlstm["expand_v"],
        "ffn_proj_factor": hidden / (2 * config.d_model),  # which is rounded up
        "ffn_round_up_to_multiple_of": hidden,
    }


CONVERTERS = {
    "xlstm": Converter(
        "xLSTM of Hugging Face transformers",
        NAMES,
        xlstm_config,
        xlstm_settings,
        {"xlstm": "xLSTMForCausalLM"},
    )
}
"""By ``model_type``."""
