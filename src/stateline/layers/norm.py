"""Normalisations: maps of each position by itself, so not sequence layers."""

from collections.abc import Callable, Mapping

from torch import nn

NORMS: Mapping[str, Callable[..., nn.Module]] = {
    "layer": lambda d_model, eps=1e-5: nn.LayerNorm(d_model, eps=eps),
    "rms": lambda d_model, eps=1e-5: nn.RMSNorm(d_model, eps=eps),
    "none": lambda _d_model, _eps=1e-5: nn.Identity(),
}
"""Layer normalisation (with bias), root-mean-square normalisation (without), or none.

Each takes the width, and what is added to the variance before its root is taken.
"""
