"""Pure functions on tensors: no parameters, no configuration, state in and state out.

Each op has a folder, and each of its backends a file in it. :data:`OPS` lists them.
"""

from stateline.ops.attention import AttentionCache, AttentionMask, attention, attention_step_
from stateline.ops.containment import all_or_nothing
from stateline.ops.convolution import slide
from stateline.ops.delta_rule import DeltaSignals, delta_rule, delta_rule_step, delta_rule_step_
from stateline.ops.diagonal_ssm import (
    DiagonalWeights,
    diagonal_ssm,
    diagonal_ssm_every,
    diagonal_ssm_step,
    diagonal_ssm_stepper,
)
from stateline.ops.dispatch import use_backend
from stateline.ops.dplr_ssm import DPLRWeights, dplr_ssm, dplr_ssm_every, dplr_ssm_step
from stateline.ops.fft_conv import fft_conv
from stateline.ops.gated_delta_rule import (
    GatedDeltaSignals,
    gated_delta_rule,
    gated_delta_rule_step,
    gated_delta_rule_step_,
)
from stateline.ops.h3_core import H3CoreState, H3Weights, h3_core, h3_core_step, h3_core_stepper
from stateline.ops.int8_linear import Int8Weight, int8_linear
from stateline.ops.linear_attention import (
    LinearSignals,
    linear_attention,
    linear_attention_step,
    linear_attention_step_,
)
from stateline.ops.linear_scan import linear_scan, linear_scan_step, linear_scan_step_
from stateline.ops.local_attention import LocalWindow, local_attention
from stateline.ops.lstm import LSTMCell, LSTMWeights, lstm
from stateline.ops.mimo_ssm import MIMOWeights, mimo_ssm, mimo_ssm_step
from stateline.ops.op import OPS, register_backend
from stateline.ops.pointwise import (
    FeedForwardWeights,
    feed_forward,
    linear_stepper,
    rms_norm,
    rotary,
    swiglu,
)
from stateline.ops.selective_scan import (
    ScanSignals,
    selective_scan,
    selective_scan_step,
    selective_scan_step_,
)
from stateline.ops.short_conv import short_conv, short_conv_step, short_conv_stepper
from stateline.ops.slstm import SLSTMCell, slstm
from stateline.ops.ssm_parameters import discretize, shift_taps

__all__ = [
    "OPS",
    "AttentionCache",
    "AttentionMask",
    "DPLRWeights",
    "DeltaSignals",
    "DiagonalWeights",
    "FeedForwardWeights",
    "GatedDeltaSignals",
    "H3CoreState",
    "H3Weights",
    "Int8Weight",
    "LSTMCell",
    "LSTMWeights",
    "LinearSignals",
    "LocalWindow",
    "MIMOWeights",
    "SLSTMCell",
    "ScanSignals",
    "all_or_nothing",
    "attention",
    "attention_step_",
    "delta_rule",
    "delta_rule_step",
    "delta_rule_step_",
    "diagonal_ssm",
    "diagonal_ssm_every",
    "diagonal_ssm_step",
    "diagonal_ssm_stepper",
    "discretize",
    "dplr_ssm",
    "dplr_ssm_every",
    "dplr_ssm_step",
    "feed_forward",
    "fft_conv",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_delta_rule_step_",
    "h3_core",
    "h3_core_step",
    "h3_core_stepper",
    "int8_linear",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_step_",
    "linear_scan",
    "linear_scan_step",
    "linear_scan_step_",
    "linear_stepper",
    "local_attention",
    "lstm",
    "mimo_ssm",
    "mimo_ssm_step",
    "register_backend",
    "rms_norm",
    "rotary",
    "selective_scan",
    "selective_scan_step",
    "selective_scan_step_",
    "shift_taps",
    "short_conv",
    "short_conv_step",
    "short_conv_stepper",
    "slide",
    "slstm",
    "swiglu",
    "use_backend",
]
