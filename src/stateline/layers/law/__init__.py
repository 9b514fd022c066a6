"""The law of sequence layers, as a check that anyone can run on their own layer."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral

import torch

from stateline.errors import InputError, one_line
from stateline.layers.base import AnyLayer, SequenceLayer, require_causal
from stateline.layers.law.case import LIMITS, Case, example_input
from stateline.layers.law.containment import nothing_leaks
from stateline.layers.law.gradients import gradients_agree
from stateline.layers.law.long import long_sequences_agree
from stateline.layers.law.outputs import (
    causality,
    donated_steps_agree,
    many_rows_agree,
    outputs_agree,
    outputs_fit,
    results_repeat,
    rows_do_not_mix,
    training_agrees,
)
from stateline.layers.law.packing import packed_rows_agree
from stateline.layers.law.precision import LOW_PRECISION_LIMIT, precision
from stateline.layers.law.report import Finding, LawReport
from stateline.layers.law.states import ages_join, saving, size, state_is_a_value
from stateline.settings import INT64, at_least, check_unwrapped

__all__ = ["LIMITS", "LOW_PRECISION_LIMIT", "Finding", "LawReport", "check_layer"]

_CLAUSES = (  # from causes to consequences
    outputs_fit,
    state_is_a_value,
    results_repeat,
    rows_do_not_mix,
    causality,
    outputs_agree,
    donated_steps_agree,
    many_rows_agree,
    training_agrees,
    ages_join,
    gradients_agree,
    long_sequences_agree,
    packed_rows_agree,
    nothing_leaks,
    saving,
    precision,
    size,
)


def check_layer(
    layer: AnyLayer,
    *,
    batch_size: int = 2,
    chunks: Sequence[int] = (5, 1, 3, 4),
    dtype: torch.dtype = torch.float64,
    length: int = 300,
    seed: int = 0,
    name: str | None = None,
) -> LawReport:
    """Check everything that a sequence layer promises, on random input.

    - ``forward``, ``forward_chunk``, ``step`` and ``step_`` agree, in outputs wherever the sequence
      is cut (after 16 tokens, only near the ends of chunks), and in gradients with respect to
      parameters, input and the incoming state.
    - Outputs have the shape (batch, length, d_output) and the dtype of the input.
    - Many rows have the outputs of few, and training mode changes nothing but by random numbers.
    - A long sequence has the outputs, gradients and states of the same in short chunks.
    - Every parameter that matters gets a gradient, and gradients are derivatives: in float64, they
      are compared with central differences, except in layers that choose (``chooses``).
    - No output depends on a later input, also in training mode, and rows do not mix.
    - The given state and input are unchanged, and every initial state is a fresh one.
    - Results depend on the arguments alone: nothing is random, or remembered by the layer.
    - Packed documents have the outputs, gradients and states of documents in rows of their own.
    - What one document holds never reaches another, even inf and NaN, and nothing flows backward in
      time: neither in outputs nor in gradients with respect to the input.
    - States of different lengths can be joined; each row then gives its outputs as if alone.
    - Saving and loading a state or a ``state_dict`` changes nothing; the settings by which a saved
      state knows its layer are attributes.
    - bfloat16 runs, with accumulators in float32.
    - ``state_bytes`` is correct, and a state holds little more memory than that.

    Args:
        layer: The layer; it is copied, not changed.
        batch_size: Rows of the input; at least 2, to detect rows that mix.
        chunks: Lengths of the chunks into which the sequence is cut; at least two.
        dtype: Precision of the check. The limit is 1e-9 in float64 and 1e-4 in float32; for packed
            rows, 1e-10 and 1e-6, or in float32 the effect of four roundings if that is larger.
        length: Tokens of the long sequence, which finds what is wrong only where kernels compute in
            blocks, such as of 64 or 256 tokens. It is left out if ``length`` is at most the sum of
            the chunks, such as 0, and shortened or left out if ``max_len`` leaves too little room.
        seed: Seed of the random input.
        name: Name of the layer in the report; by default its class.

    Returns:
        The findings: ``report.ok`` is true if all clauses hold, ``str(report)`` is a table. If one
        is broken, ``report.diagnosis`` says what is wrong in one sentence.

    Raises:
        InputError: If the layer is not causal (the law is about causal layers), or an argument is
            wrong.

    Example:
        >>> from stateline.layers import S4D
        >>> check_layer(S4D(4, d_state=4)).ok
        True
    """
    check_unwrapped("layer", layer)
    if not isinstance(layer, SequenceLayer):
        raise InputError(
            f"check_layer takes a layer, an instance of a subclass of SequenceLayer, got {layer!r}"
        )
    if dtype not in tuple(LIMITS):
        raise InputError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    for what, number in {"batch_size": batch_size, "length": length, "seed": seed}.items():
        if not isinstance(number, Integral) or int(number) not in INT64:
            raise InputError(f"{what} must be a whole number, such as 2, got {number!r}")
    whole = isinstance(chunks, Sequence) and all(isinstance(n, Integral) for n in chunks)
    if not whole or len(chunks) < 2 or min(chunks) < 1:
        raise InputError(f"chunks must be two or more lengths of at least 1, got {chunks}")
    sizes = tuple(map(int, chunks))
    at_least(2, batch_size=batch_size)
    at_least(0, length=length)
    require_causal(layer, "the law")
    subject = copy.deepcopy(layer).to(dtype).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seed))
        x = example_input(subject, int(batch_size), sum(sizes), dtype)
        case = Case(subject, x, sizes, dtype, int(length))
        with suppress(Exception):
            case.warm()  # the first call also makes initial states, to learn their shapes
        findings = [finding for clause in _CLAUSES for finding in _apply(clause, case)]
    return LawReport(name or type(layer).__name__, tuple(findings), case.longest)


def _apply(clause: Callable[[Case], Iterator[Finding]], case: Case) -> list[Finding]:
    """Findings of one clause, on an input of its own; a layer that raises breaks it."""
    try:
        return list(clause(replace(case, x=case.x.clone())))
    except Exception as error:
        title = (clause.__doc__ or "").rstrip(".")
        note = f"the check that {title.lower()} raises {one_line(error)}"
        return [Finding(title, float("inf"), case.limit, note)]
