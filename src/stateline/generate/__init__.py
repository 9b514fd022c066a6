"""Generation: from a prompt or a kept state to the tokens and the text that follow."""

import warnings
from typing import Any

from stateline.generate.answers import answer
from stateline.generate.encoding import prefill_chunks, token_chunks
from stateline.generate.ragged import read_ragged
from stateline.generate.random import uniform
from stateline.generate.runs import NumberTokenizer, growing_layers, load_run
from stateline.generate.sampling import GREEDY, Sampling, choose
from stateline.generate.session import (
    Choice,
    Session,
    SessionState,
    extend,
    prefill,
    seeded,
)
from stateline.generate.state_files import Kept, load_kept, save_kept
from stateline.generate.text import DecodedToken, HeldText, TextStream, decode_text
from stateline.generate.tokens import check_length, generate, stream

__all__ = [
    "GREEDY",
    "Choice",
    "DecodedToken",
    "HeldText",
    "Kept",
    "NumberTokenizer",
    "Sampling",
    "Session",
    "SessionState",
    "TextStream",
    "answer",
    "check_length",
    "choose",
    "decode_text",
    "extend",
    "generate",
    "growing_layers",
    "load_kept",
    "load_run",
    "prefill",
    "prefill_chunks",
    "read_ragged",
    "save_kept",
    "seeded",
    "stream",
    "token_chunks",
    "uniform",
]

_RENAMED = {
    "Written": "DecodedToken",
    "begin": "prefill",
    "read": "extend",
    "read_pieces": "prefill_chunks",
    "token_pieces": "token_chunks",
    "write": "decode_text",
}


def __getattr__(name: str) -> Any:
    """Forward names of earlier versions."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(
        f"stateline.generate.{name} is now called {new}", DeprecationWarning, stacklevel=2
    )
    return globals()[new]
