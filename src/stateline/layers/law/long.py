"""The clause about long sequences, which many layers compute in another way than short ones."""

from collections.abc import Iterator

import torch
from torch import Tensor

from stateline.layers.law.case import Case, by_position, differing, relative
from stateline.layers.law.gradients import compare, gradients
from stateline.layers.law.report import Finding, explained


def long_sequences_agree(case: Case) -> Iterator[Finding]:
    """Long sequences agree with the same in short chunks."""
    size, length = case.x.shape[1], case.longest
    if length == size:
        return
    x = case.example(len(case.x), length)
    x.requires_grad_(x.is_floating_point())
    sizes = [part.shape[1] for part in x.split(size, dim=1)]
    short, end = case.run(x, sizes, case.init())
    whole = case.layer(x)
    with torch.no_grad():
        once, after = case.layer.forward_chunk(x, case.init())
        following, wanted = (case.layer.forward_chunk(case.x, own)[0] for own in (after, end))
    results = {"forward": whole, "forward_chunk": once}

    def causes() -> Iterator[str]:
        for verb, y in results.items():
            if relative(y, short) > case.limit:
                place = _first(y, short, case.limit)
                yield f"{verb} of {length} tokens is not that of chunks of {size}, first at {place}"
        names, told = differing(after, end, case.limit), f"forward_chunk of {length} tokens"
        yield f"{told} leaves another state than chunks of {size}: {names}"

    error = max(relative(following, wanted), *(relative(y, short) for y in results.values()))
    yield explained("long = short chunks", error, case.limit, causes())
    weight = torch.randn_like(whole)
    found, told = (gradients(case, x, y, weight, ()) for y in (whole, short))
    yield compare("gradients: long = short chunks", found, told, case.limit)


def _first(y: Tensor, wanted: Tensor, limit: float) -> str:
    """The first position at which outputs differ."""
    apart = by_position(y.detach(), wanted.detach()) / (wanted.detach().abs().max() or 1.0)
    return f"position {int((~(apart <= limit)).nonzero()[0])}"
