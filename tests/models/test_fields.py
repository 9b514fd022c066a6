"""Every field of a ``config.json`` counts.

Ours and transformers read the same file alike, or ours says which field it cannot express. With
``pytest -s -m slow tests/models/test_fields.py``, the outcomes of each family and of all are
printed.
"""

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.errors import InputError
from stateline.models.convert.table import load_pretrained
from tests.models.published import LIMITS, MODELS, saved, tokens, transformers

pytestmark = [pytest.mark.slow, pytest.mark.cpu]

WORDS = {
    "hidden_act": ["gelu", "relu"],
    "hidden_activation": ["silu"],
    "activation_function": ["gelu", "relu", "silu"],
    "mlp_hidden_act": ["silu"],
    "mamba_hidden_act": ["gelu"],
    "position_embedding_type": ["rope", "alibi"],
    "dtype": ["bfloat16"],
}
"""Other values of texts."""

ADDED: dict[str, list[Any]] = {
    "add_cross_attention": [True],
    "attention_bias": [True],
    "attention_layers": [["local", "local", "global", "global"], ["local", "local"]],
    "attention_multiplier": [0.5],
    "attn_layer_indices": [[0]],
    "embedding_multiplier": [2.0],
    "expand": [1],
    "head_dim": [4, 16],
    "hidden_act": ["relu"],
    "is_causal": [False],
    "is_decoder": [True],
    "layer_types": [["full_attention"] * 2, ["sliding_attention", "full_attention"]],
    "logits_scaling": [2.0],
    "logits_soft_cap": [1.0],
    "mlp_bias": [True],
    "num_experts": [4],
    "num_heads": [2],
    "num_key_value_heads": [1],
    "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.1}}],
    "qk_norm": [True],
    "quantization_config": [{"quant_method": "fp8"}],
    "residual_multiplier": [0.5],
    "rms_norm_eps": [0.1],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 100.0}, {"rope_theta": 100.0}],
    "rope_scaling": [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ],
    "rope_theta": [100.0],
    "rotary_emb_base": [100],
    "rotary_pct": [0.5],
    "scale_attn_weights": [False],
    "sliding_window": [3],
    "ssm_cfg": [{"layer": "Mamba2"}, {}],
    "something_new": [1.5, False],
    "text_config": [{"hidden_size": 64}],
    "tie_word_embeddings": [True],
    "time_step_limit": [[0.01, 0.1]],
    "time_step_min": [0.1],
    "use_bias": [True],
    "use_sliding_window": [True],
    "window_size": [2],
}
"""Fields that are added where they are missing."""


def others(name: str, value: Any) -> Iterator[Any]:
    """Other values of a field."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, value / 2 if isinstance(value, float) else value // 2)
    elif isinstance(value, str):
        yield from WORDS.get(name, [])
    elif value is None:
        yield from (2, 0.5, True)
    elif isinstance(value, list) and value:
        yield from (value[::-1], value[:-1], value + value[-1:])
    yield None


def changed(settings: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was changed, and the settings: a field is missing, another, or new; also in groups."""
    for name, value in settings.items():
        if name in ("architectures", "model_type"):
            continue
        yield f"without {name}", {k: v for k, v in settings.items() if k != name}
        for other in others(name, value):
            yield f"{name}={other}", {**settings, name: other}
        if isinstance(value, dict):
            for change, group in changed(value):
                yield f"{name}: {change}", {**settings, name: group}
            for key, new in (("factor", 2.0), ("partial_rotary_factor", 0.5), ("rope_theta", 9.0)):
                yield f"{name}: {key}={new}", {**settings, name: {**value, key: new}}
    for name, values in ADDED.items():
        for value in values if "rope_type" not in settings else ():
            if settings.get(name) != value:
                yield f"{name}={value}", {**settings, name: value}


def official_logits(folder: Path) -> Any:
    """As transformers reads the folder; ``None`` if it does not, or not all of its tensors fit."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        with torch.no_grad():
            return model.eval()(tokens()).logits
    except Exception:  # whatever its own checks and layers raise
        return None


def compare(folder: Path, limit: float) -> str:
    """How ours and transformers read a folder."""
    try:
        model = load_pretrained(folder)
        with torch.no_grad():
            ours = model(tokens())
    except InputError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    except Exception:
        return "traceback"
    wanted = official_logits(folder)
    if wanted is None:
        return "read by ours alone"
    error = float((ours - wanted).abs().max() / wanted.abs().max())
    return "equal" if error <= limit else "wrong"


def outcomes_of(folder: Path, limit: float) -> dict[str, list[str]]:
    """The changes of a model's fields by how both read the file; none may be read wrongly."""
    config = folder / "config.json"
    settings = json.loads(config.read_text())
    outcomes: dict[str, list[str]] = defaultdict(list)
    for change, new in changed(copy.deepcopy(settings)):
        config.write_text(json.dumps(new))
        outcomes[compare(folder, limit)].append(change)
    assert not outcomes["wrong"]
    assert not outcomes["traceback"]
    assert not outcomes["refused in several lines"]
    return outcomes


@pytest.fixture(scope="module")
def outcomes_of_all() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter({"wrong": 0, "traceback": 0})
    yield counts
    print(f"\n{sum(counts.values())} loads of all families: {dict(counts)}")  # noqa: T201


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("unannotated")  # the reader must notice, not the checks of annotations
def test_no_field_is_ignored_that_transformers_reads(
    name: str, tmp_path: Path, outcomes_of_all: Counter[str]
) -> None:
    saved(name, tmp_path)
    fields = len(json.loads((tmp_path / "config.json").read_text()))
    outcomes = outcomes_of(tmp_path, LIMITS.get(MODELS[name][0], 6e-6))
    counts = {outcome: len(changes) for outcome, changes in outcomes.items()}
    outcomes_of_all.update(counts)
    print(f"{name}: {counts}")  # noqa: T201 (pytest -s shows it)
    assert len(outcomes["equal"]) > fields  # more than what is left out in turn
