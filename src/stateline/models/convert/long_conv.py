"""Implicit filters, from the weights of the official Hyena code."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.models.convert.weights import rename

_NAMES = {
    "bias": "skip",
    "pos_emb.z": "features",
    "pos_emb.t": "times",
    "modulation.deltas": "rates",
}


def implicit_filter_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of :class:`stateline.layers.mixers.long_conv.ImplicitFilters`.

    Args:
        tensors: State dict of ``HyenaFilter`` in HazyResearch/safari.

    Returns:
        By our names.

    Raises:
        InputError: If tensors are missing or left over, or the frequencies of its sines differ.
    """
    numbers = {int(m[1]) for n in tensors if (m := re.match(r"implicit_filter\.(\d+)\.", n))}
    last = max(numbers, default=4)
    maps, part = list(range(0, last, 2)), "implicit_filter."
    names = _NAMES | {f"{part}{n}.{p}": f"{n}.{p}" for n in maps for p in ("weight", "bias")}
    names |= {f"{part}{n + 1}.freq": f"{n}.freq" for n in maps}
    ours = rename(tensors, names | {f"{part}{last}.weight": "w_out"})
    sines = [ours.pop(f"{n}.freq").flatten() for n in maps]
    if any(not torch.equal(sine, sines[0]) for sine in sines):
        raise InputError("an official filter has one sine module: all its freq must be equal")
    ours["w_in"], ours["b_in"] = ours.pop("0.weight"), ours.pop("0.bias")
    ours["w_hidden"] = torch.stack([ours.pop(f"{n}.weight") for n in maps[1:]])
    ours["b_hidden"] = torch.stack([ours.pop(f"{n}.bias") for n in maps[1:]])
    features, rates = ours["features"][0], ours["rates"].flatten().abs()
    return ours | {
        "frequency": sines[0],
        "features": features,
        "times": ours["times"].flatten(),
        "rates": rates,
    }
