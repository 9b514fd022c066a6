"""Sequence layers: ``LAYERS`` and ``WRAPPERS`` are the table of contents.

To add a layer, add a file and a line: it must be constructible from ``d_model`` alone, all else
keyword-only with defaults. Its contract tests, pattern name and benches come with the line.
"""

from collections.abc import Mapping

from stateline.layers.attention import Attention
from stateline.layers.base import AnyLayer, SequenceLayer
from stateline.layers.block_recurrent import BlockRecurrent
from stateline.layers.block_state import BlockState
from stateline.layers.cached_staircase import CachedStaircase
from stateline.layers.compose import Branch, Parallel, PostNorm, Residual, Stack
from stateline.layers.diagonal_ssm import DiagonalSSM
from stateline.layers.dss import DSS
from stateline.layers.feed_forward import FeedForward
from stateline.layers.feedback import Feedback
from stateline.layers.gated_delta_net import GatedDeltaNet
from stateline.layers.gss import GSS
from stateline.layers.h3 import H3
from stateline.layers.ladder import Ladder
from stateline.layers.linear_attention import LinearAttention
from stateline.layers.long_conv import LongConv
from stateline.layers.lstm import LSTM
from stateline.layers.mamba import Mamba
from stateline.layers.mamba2 import Mamba2
from stateline.layers.norm import NORMS
from stateline.layers.s4 import S4, S4SSM
from stateline.layers.s4d import S4D
from stateline.layers.s5 import S5, S5SSM, BidirectionalS5
from stateline.layers.shift_ssm import ShiftSSM
from stateline.layers.sliding_attention import SlidingAttention
from stateline.layers.staircase import Staircase
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
    "block_recurrent": BlockRecurrent,
    "block_state": BlockState,
    "diagonal_ssm": DiagonalSSM,
    "dss": DSS,
    "feed_forward": FeedForward,
    "gated_delta_net": GatedDeltaNet,
    "gss": GSS,
    "h3": H3,
    "linear_attention": LinearAttention,
    "long_conv": LongConv,
    "lstm": LSTM,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
    "shift_ssm": ShiftSSM,
    "sliding_attention": SlidingAttention,
}

WRAPPERS: Mapping[str, type[AnyLayer]] = {
    "cached_staircase": CachedStaircase,
    "feedback": Feedback,
    "ladder": Ladder,
    "staircase": Staircase,
}
"""Layers made from a core: the first constructor argument is any sequence layer."""

ATTENTION_WRAPPERS = ("cached_staircase", "feedback")
"""Those whose core must consist of attention and feed-forwards."""

__all__ = [
    "ATTENTION_WRAPPERS",
    "DSS",
    "GSS",
    "H3",
    "LAYERS",
    "LSTM",
    "NORMS",
    "S4",
    "S4D",
    "S4SSM",
    "S5",
    "S5SSM",
    "WRAPPERS",
    "AnyLayer",
    "Attention",
    "BidirectionalS5",
    "BlockRecurrent",
    "BlockState",
    "Branch",
    "CachedStaircase",
    "DiagonalSSM",
    "FeedForward",
    "Feedback",
    "GatedDeltaNet",
    "Ladder",
    "LinearAttention",
    "LongConv",
    "Mamba",
    "Mamba2",
    "Parallel",
    "PostNorm",
    "Residual",
    "SequenceLayer",
    "ShiftSSM",
    "SlidingAttention",
    "Stack",
    "Staircase",
    "cat_states",
    "detach",
    "load_state",
    "nbytes",
    "save_state",
    "select_rows",
    "to",
]
