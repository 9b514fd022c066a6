"""Pure functions on tensors: no parameters, no configuration, state in and state out.

Each op has a folder, each backend a file in it; ``OPS`` is the table of contents.
"""

from collections.abc import Mapping
from types import ModuleType

from stateline.ops.attention import BACKENDS as _ATTENTION
from stateline.ops.attention import attention
from stateline.ops.backend import use_backend
from stateline.ops.convolution import slide
from stateline.ops.diagonal_ssm import BACKENDS as _DIAGONAL_SSM
from stateline.ops.diagonal_ssm import (
    diagonal_ssm,
    diagonal_ssm_chunk,
    diagonal_ssm_every,
    diagonal_ssm_step,
)
from stateline.ops.dplr_ssm import BACKENDS as _DPLR_SSM
from stateline.ops.dplr_ssm import dplr_ssm, dplr_ssm_chunk, dplr_ssm_every, dplr_ssm_step
from stateline.ops.fft_conv import BACKENDS as _FFT_CONV
from stateline.ops.fft_conv import fft_conv
from stateline.ops.gated_delta_rule import BACKENDS as _GATED_DELTA_RULE
from stateline.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from stateline.ops.linear_attention import BACKENDS as _LINEAR_ATTENTION
from stateline.ops.linear_attention import linear_attention, linear_attention_step
from stateline.ops.local_attention import BACKENDS as _LOCAL_ATTENTION
from stateline.ops.local_attention import local_attention
from stateline.ops.lstm import BACKENDS as _LSTM
from stateline.ops.lstm import lstm
from stateline.ops.mimo_ssm import BACKENDS as _MIMO_SSM
from stateline.ops.mimo_ssm import mimo_ssm, mimo_ssm_chunk, mimo_ssm_step
from stateline.ops.selective_scan import BACKENDS as _SELECTIVE_SCAN
from stateline.ops.selective_scan import selective_scan, selective_scan_step
from stateline.ops.short_conv import BACKENDS as _SHORT_CONV
from stateline.ops.short_conv import short_conv

OPS: Mapping[str, Mapping[str, ModuleType]] = {
    "attention": _ATTENTION,
    "diagonal_ssm": _DIAGONAL_SSM,
    "dplr_ssm": _DPLR_SSM,
    "fft_conv": _FFT_CONV,
    "gated_delta_rule": _GATED_DELTA_RULE,
    "linear_attention": _LINEAR_ATTENTION,
    "local_attention": _LOCAL_ATTENTION,
    "lstm": _LSTM,
    "mimo_ssm": _MIMO_SSM,
    "selective_scan": _SELECTIVE_SCAN,
    "short_conv": _SHORT_CONV,
}

__all__ = [
    "OPS",
    "attention",
    "diagonal_ssm",
    "diagonal_ssm_chunk",
    "diagonal_ssm_every",
    "diagonal_ssm_step",
    "dplr_ssm",
    "dplr_ssm_chunk",
    "dplr_ssm_every",
    "dplr_ssm_step",
    "fft_conv",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "linear_attention",
    "linear_attention_step",
    "local_attention",
    "lstm",
    "mimo_ssm",
    "mimo_ssm_chunk",
    "mimo_ssm_step",
    "selective_scan",
    "selective_scan_step",
    "short_conv",
    "slide",
    "use_backend",
]
