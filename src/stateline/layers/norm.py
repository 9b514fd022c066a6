"""Normalisations: maps of each position by itself, so not sequence layers."""

from collections.abc import Callable, Mapping

from torch import nn

NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "layer": lambda d_model: nn.LayerNorm(d_model, eps=1e-5),
    "rms": lambda d_model: nn.RMSNorm(d_model, eps=1e-5),
}
"""Layer normalisation (with bias), and root-mean-square normalisation (without)."""
