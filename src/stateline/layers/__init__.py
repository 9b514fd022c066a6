"""Sequence layers: ``LAYERS`` and ``WRAPPERS`` are the table of contents.

To add a layer, add a file and a line: it must be constructible from ``d_model`` alone, all else
keyword-only with defaults. Its contract tests, pattern name and benches come with the line.
"""

from collections.abc import Mapping

from stateline.layers.attention import Attention
from stateline.layers.base import AnyLayer, SequenceLayer
from stateline.layers.compose import Branch, Parallel, PostNorm, Residual, Stack
from stateline.layers.diagonal_ssm import DiagonalSSM
from stateline.layers.feed_forward import FeedForward
from stateline.layers.gss import GSS
from stateline.layers.h3 import H3
from stateline.layers.ladder import Ladder
from stateline.layers.long_conv import LongConv
from stateline.layers.lstm import LSTM
from stateline.layers.norm import NORMS
from stateline.layers.s4d import S4D
from stateline.layers.shift_ssm import ShiftSSM
from stateline.layers.state import (
    cat_states,
    detach,
    load_state,
    nbytes,
    save_state,
    select_rows,
    to,
)

LAYERS: Mapping[str, type[AnyLayer]] = {
    "attention": Attention,
    "diagonal_ssm": DiagonalSSM,
    "feed_forward": FeedForward,
    "gss": GSS,
    "h3": H3,
    "long_conv": LongConv,
    "lstm": LSTM,
    "s4d": S4D,
    "shift_ssm": ShiftSSM,
}

WRAPPERS: Mapping[str, type[AnyLayer]] = {
    "ladder": Ladder,
}
"""Layers made from a core: the first constructor argument is any sequence layer."""

__all__ = [
    "GSS",
    "H3",
    "LAYERS",
    "LSTM",
    "NORMS",
    "S4D",
    "WRAPPERS",
    "AnyLayer",
    "Attention",
    "Branch",
    "DiagonalSSM",
    "FeedForward",
    "Ladder",
    "LongConv",
    "Parallel",
    "PostNorm",
    "Residual",
    "SequenceLayer",
    "ShiftSSM",
    "Stack",
    "cat_states",
    "detach",
    "load_state",
    "nbytes",
    "save_state",
    "select_rows",
    "to",
]
