"""Sequence layers, listed in ``LAYERS`` and ``WRAPPERS``.

To add a layer to the package, add a file and a line. It must be constructible from ``d_model``
alone; all options are keyword-only with defaults. Its contract tests, pattern name and benches come
with the line. A layer outside the package gets its name by ``register_layer``.
"""

import inspect
from functools import partial
from types import EllipsisType
from typing import Any

from stateline.layers.base import AnyLayer, SequenceLayer, accumulates
from stateline.layers.compose import (
    Branch,
    NormAfter,
    NormedResidual,
    ParallelResidual,
    PostNorm,
    Residual,
    Sandwich,
    Stack,
)
from stateline.layers.mixers.aft import AFT
from stateline.layers.mixers.attention import Attention
from stateline.layers.mixers.block_recurrent import BlockRecurrent
from stateline.layers.mixers.block_state import BlockState
from stateline.layers.mixers.channel_mixing import ChannelMixing
from stateline.layers.mixers.diagonal_ssm import DiagonalSSM
from stateline.layers.mixers.dss import DSS
from stateline.layers.mixers.feed_forward import FeedForward
from stateline.layers.mixers.gated_conv import GatedConv
from stateline.layers.mixers.gated_delta_net import GatedDeltaNet
from stateline.layers.mixers.gated_linear_attention import GatedLinearAttention
from stateline.layers.mixers.gss import GSS
from stateline.layers.mixers.h3 import H3
from stateline.layers.mixers.hgrn2 import HGRN2
from stateline.layers.mixers.hyena import Hyena
from stateline.layers.mixers.kimi_delta_attention import KimiDeltaAttention
from stateline.layers.mixers.latent_attention import LatentAttention
from stateline.layers.mixers.lightning_attention import LightningAttention
from stateline.layers.mixers.linear_attention import LinearAttention
from stateline.layers.mixers.long_conv import LongConv
from stateline.layers.mixers.lstm import LSTM
from stateline.layers.mixers.mamba import Mamba
from stateline.layers.mixers.mamba2 import Mamba2
from stateline.layers.mixers.mamba3 import Mamba3
from stateline.layers.mixers.mlstm import MLSTM
from stateline.layers.mixers.moe import MoE
from stateline.layers.mixers.retention import Retention
from stateline.layers.mixers.rg_lru import RGLRU
from stateline.layers.mixers.rwkv7 import RWKV7
from stateline.layers.mixers.s4 import S4, S4SSM
from stateline.layers.mixers.s4d import S4D
from stateline.layers.mixers.s5 import S5, S5SSM
from stateline.layers.mixers.shift_ssm import ShiftSSM
from stateline.layers.mixers.sliding_attention import SlidingAttention
from stateline.layers.mixers.slstm import SLSTM
from stateline.layers.norm import NORMS
from stateline.layers.state import (
    cat_states,
    detach,
    load_state,
    nbytes,
    save_state,
    select_rows,
    to,
)
from stateline.layers.wrappers.bidirectional import Bidirectional
from stateline.layers.wrappers.cached_staircase import CachedStaircase
from stateline.layers.wrappers.feedback import Feedback
from stateline.layers.wrappers.ladder import Ladder
from stateline.layers.wrappers.parallel import Parallel
from stateline.layers.wrappers.shared import Shared
from stateline.layers.wrappers.shared_transformer import SharedTransformer
from stateline.layers.wrappers.staircase import Staircase
from stateline.layers.wrappers.state_passing import StatePassing
from stateline.layers.wrappers.value_residual import ValueResidual
from stateline.plugins import Registry

LAYERS: Registry[type[AnyLayer]] = Registry(
    "layer",
    "stateline.layers",
    SequenceLayer,
    "d_model",
    {
        "aft": AFT,
        "attention": Attention,
        "block_recurrent": BlockRecurrent,
        "block_state": BlockState,
        "channel_mixing": ChannelMixing,
        "diagonal_ssm": DiagonalSSM,
        "dss": DSS,
        "feed_forward": FeedForward,
        "gated_conv": GatedConv,
        "gated_delta_net": GatedDeltaNet,
        "gated_linear_attention": GatedLinearAttention,
        "gss": GSS,
        "h3": H3,
        "hgrn2": HGRN2,
        "hyena": Hyena,
        "kimi_delta_attention": KimiDeltaAttention,
        "latent_attention": LatentAttention,
        "lightning_attention": LightningAttention,
        "linear_attention": LinearAttention,
        "long_conv": LongConv,
        "lstm": LSTM,
        "mamba": Mamba,
        "mamba2": Mamba2,
        "mamba3": Mamba3,
        "mlstm": MLSTM,
        "moe": MoE,
        "retention": Retention,
        "rg_lru": RGLRU,
        "rwkv7": RWKV7,
        "s4": S4,
        "s4d": S4D,
        "s5": S5,
        "shift_ssm": ShiftSSM,
        "sliding_attention": SlidingAttention,
        "slstm": SLSTM,
    },
)

WRAPPERS: Registry[type[AnyLayer]] = Registry(
    "wrapper",
    "stateline.wrappers",
    SequenceLayer,
    "core",
    {
        "bidirectional": Bidirectional,
        "cached_staircase": CachedStaircase,
        "feedback": Feedback,
        "ladder": Ladder,
        "parallel": Parallel,
        "shared": Shared,
        "shared_transformer": SharedTransformer,
        "staircase": Staircase,
        "state_passing": StatePassing,
        "value_residual": ValueResidual,
    },
)
"""Layers made from a core: the first constructor argument is any sequence layer."""

ATTENTION_WRAPPERS = ("cached_staircase", "feedback")
"""Wrappers whose core must consist of attention and feed-forwards."""

NOT_CAUSAL = ("bidirectional",)
"""Wrappers without a state, for models of whole rows."""

LAYERS.share_names(WRAPPERS)


def register_layer(name: str, cls: type[Any] | EllipsisType = ...) -> Any:
    """Give a layer of your own a name in patterns, also as ``@register_layer("mine")``.

    The constructor takes ``d_model``, or ``core`` if the layer is a wrapper around other layers.
    Everything else is keyword-only with defaults and annotations: what a pattern may set.

    Args:
        name: The name: letters, digits and underscores.
        cls: A subclass of :class:`SequenceLayer`; without it, a decorator is returned.

    Returns:
        The class.

    Raises:
        InputError: If the name is malformed or taken by another class, or if the class cannot be
            constructed from the keywords of a pattern.
    """
    if isinstance(cls, EllipsisType):
        return partial(register_layer, name)
    is_wrapper = isinstance(cls, type) and "core" in inspect.signature(cls.__init__).parameters
    (WRAPPERS if is_wrapper else LAYERS).register(name, cls)
    return cls


__all__ = [
    "AFT",
    "ATTENTION_WRAPPERS",
    "DSS",
    "GSS",
    "H3",
    "HGRN2",
    "LAYERS",
    "LSTM",
    "MLSTM",
    "NORMS",
    "NOT_CAUSAL",
    "RGLRU",
    "RWKV7",
    "S4",
    "S4D",
    "S4SSM",
    "S5",
    "S5SSM",
    "SLSTM",
    "WRAPPERS",
    "AnyLayer",
    "Attention",
    "Bidirectional",
    "BlockRecurrent",
    "BlockState",
    "Branch",
    "CachedStaircase",
    "ChannelMixing",
    "DiagonalSSM",
    "FeedForward",
    "Feedback",
    "GatedConv",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "Hyena",
    "KimiDeltaAttention",
    "Ladder",
    "LatentAttention",
    "LightningAttention",
    "LinearAttention",
    "LongConv",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MoE",
    "NormAfter",
    "NormedResidual",
    "Parallel",
    "ParallelResidual",
    "PostNorm",
    "Residual",
    "Retention",
    "Sandwich",
    "SequenceLayer",
    "Shared",
    "SharedTransformer",
    "ShiftSSM",
    "SlidingAttention",
    "Stack",
    "Staircase",
    "StatePassing",
    "ValueResidual",
    "accumulates",
    "cat_states",
    "detach",
    "load_state",
    "nbytes",
    "register_layer",
    "save_state",
    "select_rows",
    "to",
]
