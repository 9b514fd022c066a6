"""The law as a diagnosis of Hugging Face causal language models.

``check_model`` reads the same tokens in one call and in every other way that ``generate`` and its
users read them, and measures how far the logits differ.
"""

import contextlib
import copy
from typing import Any

import torch

from stateline.errors import InputError, one_line
from stateline.generate.hugging_face import HUGGING_FACE
from stateline.hf_check.clauses import CALLS, CLAUSES, Clause, NotOffered, Trial
from stateline.hf_check.load import load_hugging_face
from stateline.hf_check.report import ModelFinding, ModelReport
from stateline.hf_check.subject import Subject

__all__ = [
    "CALLS",
    "CLAUSES",
    "HUGGING_FACE",
    "LIMITS",
    "ModelFinding",
    "ModelReport",
    "check_model",
    "load_hugging_face",
    "padding_error",
    "steps_error",
]

LIMITS = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest relative error that passes, by dtype. Some models compute parts in float32 by themselves;
these leave errors near 1e-6 even in float64."""

LEAST_EFFECT = 10
"""The past must change later logits by this many times the limit, or the check proves nothing."""


def check_model(
    model: Any,
    *,
    dtype: torch.dtype = torch.float64,
    length: int = 40,
    seed: int = 0,
    name: str | None = None,
) -> ModelReport:
    """Check that a causal language model of ``transformers`` gives the same logits in every call.

    The reference is one ``forward`` over the whole text without a cache. It is compared with
    single steps, continuation by several tokens, odd chunks, left padding, ragged rows, single
    rows, copies of a cache, beam reordering, rollback, the tokens of ``generate``, and packed rows.
    Each call is checked in two ways: with the arguments that ``generate`` prepares, and plainly
    with tokens, cache and mask. Packed rows are checked as trainers pass them.

    Args:
        model: A ``PreTrainedModel`` with a language modelling head; it is copied, not changed.
        dtype: Precision of the check: float64 (limit 1e-4) or float32 (limit 1e-3).
        length: Tokens of the random text; at least 24.
        seed: Seed of the random text.
        name: Name of the model in the report; by default its class.

    Returns:
        The findings: ``report.ok`` is true if every offered call is right and the control shows
        that the past matters; ``str(report)`` is a table that ends with the calls that are safe.

    Raises:
        InputError: If the text is too short, there is no limit for the dtype, or the model cannot
            read a whole text in one call, which is the reference.
    """
    if dtype not in LIMITS or length < 24:
        raise InputError(
            f"dtype must be float64 or float32 and length at least 24, got {dtype}, {length}"
        )
    twin, label = _exact(copy.deepcopy(model), dtype), name or type(model).__name__
    findings = []
    with torch.no_grad():
        effect = _control(_trial(twin, length=length, seed=seed), label)
        for plain in (False, True):
            trial = _trial(twin, plain=plain, length=length, seed=seed)
            findings += [_finding(c, trial, LIMITS[dtype]) for c in CLAUSES if c.plain or not plain]
    return ModelReport(label, tuple(findings), effect, effect >= LEAST_EFFECT * LIMITS[dtype])


def padding_error(model: Any) -> float:
    """Relative error of a padded batch that is read in single steps, in the model's precision.

    The model is called as ``generate`` calls it; it is neither copied nor changed.
    """
    with torch.no_grad():
        trial = _trial(model)
        return max(trial.ragged_steps(), trial.rows_alone())


def steps_error(model: Any) -> float:
    """As :func:`padding_error`, for a batch of rows of one length."""
    with torch.no_grad():
        trial = _trial(model)
        return max(trial.pieces(trial.steps), trial.rows_alone())


def _trial(model: Any, *, plain: bool = False, length: int = 24, seed: int = 0) -> Trial:
    """Two rows of random text for a model."""
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(min(3, vocab_size - 1), vocab_size, (2, length), generator=generator)
    return Trial(Subject(model, plain=plain), ids.to(model.device))


def _exact(model: Any, dtype: torch.dtype) -> Any:
    """The model in this precision; grouped products of experts have no float64 kernel."""
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # a model without experts
            model.set_experts_implementation("eager")
    model.generation_config.eos_token_id = None  # so that all texts get the same length
    return model.to(dtype).eval()


def _control(trial: Trial, name: str) -> float:
    """The effect of the past on the reference, without which no call can be judged."""
    try:
        return trial.effect_of_the_past()
    except Exception as reason:
        raise InputError(
            f"{name} cannot read a text of {trial.length} tokens in one call: "
            f"{one_line(reason)[:120]}; give a causal language model that can"
        ) from reason


def _finding(clause: Clause, trial: Trial, limit: float) -> ModelFinding:
    """The finding of one clause; a call that raises is an infinite error."""
    mode = "training" if clause.training else "plain" if trial.subject.plain else "generate"
    try:
        error, note = clause.measure(trial), ""
    except NotOffered as reason:
        return ModelFinding(mode, clause.call, clause.title, None, limit, str(reason))
    except Exception as reason:
        error, note = float("inf"), one_line(reason)[:120]
    return ModelFinding(mode, clause.call, clause.title, error, limit, note)
