"""Which settings of a case its tests read, so that no option of a vector is silently ignored.

A setting is read if its name stands as a string in a test module that covers the case's kind, or in
a converter that such a module imports. Any other must be listed in ``UNREAD``, with its reason.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.parity.cases import COVERED_BY, Case

ABOUT = {"name", "id", "file", "source", "kind", "case", "description", "note", "notes", "seed"}
ABOUT |= {"python", "torch", "transformers", "dtype", "mode", "layout", "generator", "seeding"}
ABOUT |= {"tensors", "shapes", "shape", "keys", "sha256", "info", "tokens_per_task"}
ABOUT |= {"scored_per_task", "statement_counts", "label_counts", "input"}
"""Where a case comes from, and what its tensors and texts show by themselves."""

MEASURED = ("check_", "max_abs_", "reload", "step_vs_", "hf_max_", "cached_generate_", "generate_")
"""How far official code was from itself."""

ANY = "any value"
SIZES = {"B", "H", "L", "N", "P_stored", "batch", "head_size", "channels", "params", "ntasks"}
SIZES |= {"head_dim", "max_position_embeddings", "layers", "hidden", "vocab", "num_examples"}
SIZES |= {"L_long", "num_test_examples", "gen_len", "bpert", "drop", "rev"}
INITIAL = {"dt_min", "dt_max", "C_init", "scaling", "slow_decay_pct", "fast_decay_pct", "target"}

UNREAD: dict[str, Any] = {
    # tensors have these sizes, and hold what was drawn with these settings
    **dict.fromkeys(SIZES | INITIAL, ANY),
    # of the official program, not of the model
    **dict.fromkeys(("device", "backend", "deterministic", "data_omit_label_idx"), ANY),
    **dict.fromkeys(("mem_sz", "validation_staircase_size_forward", "B_imag_entries_over_2"), ANY),
    "missing": [[]],
    "unexpected": [[]],
    # models without dropout in evaluation; no layer of ours has an adaptive span
    **dict.fromkeys(("dropout", "emb_drop", "out_drop"), ANY),
    "adapt_span": [False],
    "adapt_span_cache": [False],
    "rank": [1],
    "feedback": [True, False],  # the kind says which model it is
    "staircase_size": ANY,  # models without a staircase have it, too
    "fix_staircase_size_forward": ANY,
    "measure": ANY,  # initial values; the kernel's test reads it
    "recurrent_layers": ANY,
}
"""Settings that need not be read: the values that they may have, and above why."""

GROUPS = ("config", "args", "cases", "kw", "kernel_args", "lstm")


def settings(about: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all settings of a description."""
    for name, value in about.items() if isinstance(about, dict) else ():
        if name.startswith("tokenizer/"):
            continue  # letters and their tokens
        if isinstance(value, dict) and (name in GROUPS or "config" in value or "/" in name):
            inner = value.values() if name == "cases" else [value]
            for part in inner:
                yield from settings(part)
        elif name not in ABOUT and not name.startswith(MEASURED):
            yield name, value


def unread(case: Case) -> dict[str, Any]:
    """Settings of a case that no test reads and that are not listed."""
    read = set[str]().union(*map(_words, COVERED_BY.get(case.kind, ())))
    return {
        name: str(value)[:80]
        for name, value in settings(case.about)
        if name not in read and (name not in UNREAD or not _allowed(UNREAD[name], value))
    }


def _allowed(values: Any, value: Any) -> bool:
    return values == ANY or value in values


@cache
def _words(module: ModuleType) -> set[str]:
    """Strings in a test module, and in the converters that it imports."""
    sources = [module, *_converters(module)]
    trees = (ast.parse(Path(str(source.__file__)).read_text("utf-8")) for source in sources)
    constants = (
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    return {node.value for node in constants if isinstance(node.value, str)}


def _converters(module: ModuleType) -> Iterator[ModuleType]:
    """The converters that a module imports, and what these share."""
    for converter in _imported(module):
        yield converter
        yield from _imported(converter)


def _imported(module: ModuleType) -> list[ModuleType]:
    values = vars(module).values()
    names = {getattr(v, "__module__", None) or getattr(v, "__name__", "") for v in values}
    return [sys.modules[n] for n in sorted(names) if n.startswith("stateline.models.convert.")]
