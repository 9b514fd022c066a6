"""Compile every Triton kernel for an H200, and print the bytes of shared memory that each needs.

No GPU is needed. ``test_triton`` runs this file.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stateline.ops.diagonal_ssm import triton_kernel as diagonal
from stateline.ops.fft_conv import triton_kernel as fourier
from stateline.ops.selective_scan import triton_kernel as selective
from stateline.ops.short_conv import triton_kernel as filters
from stateline.ops.triton_common import tokens

TARGET = GPUTarget("cuda", 90, 32)
WHOLE = {"ROWS": 16, "T": 32, "N": 32, "PRECISION": "tf32x3"}
FILTER = {"COUNT": 64, "BACK": 2}
POINTS = {"N1": 64, "N2": 64, "PRECISION": "tf32x3"}
LINES = {"N1": 64, "M": 4096, "WIDTH": 64, "PRECISION": "tf32x3"}
HALF = {"q", "k", "v", "u", "y", "dy", "dq", "dv", "dk"}
NUMBERS = {"length", "batch", "rows", "channels", "outputs", "pieces", "count", "total", "modes"}
NUMBERS |= {"groups", "states"}
NUMBERS |= {"stride", "q_stride", "k_stride", "v_stride", "row_stride", "time_stride"}
NUMBERS |= {"batch_stride", "channel_stride"}


def shared(kernel: Any, constants: dict[str, Any], warps: int = 4, **types: str) -> int:
    """Compile for bfloat16 signals."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in types:
            return types[name]
        if name in NUMBERS:
            return "i32"
        if name == "numbers":
            return "*i32"
        return "*bf16" if name in HALF else "*fp32"

    source = ASTSource(kernel, {n: kind(n) for n in kernel.arg_names}, constexprs=constants)
    options = {"num_warps": warps, "num_stages": 1}
    found: int = triton.compile(source, target=TARGET, options=options).metadata.shared
    return found


def main() -> None:
    gated = FILTER | {"GATED": True, "RESETS": False}
    plain = {"COUNT": 1, "BACK": 0, "GATED": False, "RESETS": False}
    packed = gated | {"RESETS": True}
    short = {"COUNT": 4, "RESETS": True, "TIMES": 32, "WIDTH": 64}
    token = {"N": 32, "WIDTH": 16}
    tile = {"RESETS": True, "TIMES": 16, "WIDTH": 16, "N": 16}
    one = {"RESETS": False, "TIMES": 1}
    few = {k: WHOLE[k] for k in ("ROWS", "T", "PRECISION")} | FILTER | {"RESETS": True}
    needs = {
        "forward": shared(diagonal.forward, WHOLE | plain | {"OUTPUT": True}),
        "gated forward": shared(diagonal.forward, WHOLE | gated | {"OUTPUT": True}),
        "backward": shared(diagonal.backward, WHOLE | plain, 8),
        "gated backward": shared(diagonal.backward, WHOLE | gated, 8),
        "packed forward": shared(diagonal.forward, WHOLE | packed | {"OUTPUT": True}),
        "packed backward": shared(diagonal.backward, WHOLE | packed, 8),
        "signal_gradient": shared(filters.signal_gradient, few),
        "weight_gradient": shared(filters.weight_gradient, few),
        "short": shared(filters.short, short | {"AHEAD": False}),
        "short_weights": shared(filters.short_weights, short),
        "convolve": shared(fourier.convolve, POINTS | {"CONJUGATE": False}, 8),
        "correlate": shared(
            fourier.correlate, POINTS | {"SEVERAL": True}, 8, taps="i32", scale="fp32"
        ),
        "spread": shared(fourier.spread, LINES),
        "gather": shared(fourier.gather, LINES),
        "selective forward": shared(selective.forward, tile | {"OUTPUT": True}, begins="*u8"),
        "selective backward": shared(selective.backward, tile, 8, begins="*u8"),
        "selective step": shared(selective.forward, tile | one | {"OUTPUT": True}, begins="*u8"),
        "h3": shared(tokens.h3, token | {"TAPS": 64}),
        "diagonal": shared(tokens.diagonal, token | {"READOUTS": 1}),
        "filtered": shared(tokens.filtered, {"TAPS": 4, "WIDTH": 16}),
    }
    print(json.dumps(needs))  # noqa: T201


if __name__ == "__main__":
    main()
