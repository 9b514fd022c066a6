"""How far a state that is rounded at every token moves from the exact one, by length."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.generate.session_state import check_model
from stateline.layers.decoder import Decoder
from stateline.layers.stored_state import storable_parts
from stateline.models.language_model import LanguageModel

FIRST, FACTOR = 16, 4
"""The first length, and the factor from one length to the next."""

AT_ONCE = 1024
"""Tokens that are drawn together."""


class Drift(NamedTuple):
    r"""How far rounding has moved a model, by the name of the rounding.

    Attributes:
        length: Tokens read.
        answers: Total variation distance :math:`\frac12 \sum_v |p(v) - \hat p(v)|` between the
            distributions of the next token, which is the chance that another token is drawn: the
            mean over the tokens since the previous reported length.
        state: Distance of the states after the last token, relative to the norm of the exact one.
    """

    length: int
    answers: dict[str, float]
    state: dict[str, float]


def _int8(x: Tensor) -> Tensor:
    """Eight bits and a scale for each vector along the last axis."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30) / 127
    return (x / scale).round_() * scale


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda x: x.bfloat16(),
    "float16": lambda x: x.half(),
    "int8": _int8,
}
"""Roundings of a state by name."""


@torch.inference_mode()
def drift(
    model: LanguageModel,
    roundings: Sequence[str] = ("bfloat16", "int8"),
    *,
    length: int = 4096,
    seed: int = 0,
) -> Iterator[Drift]:
    """Read random tokens with an exact state and with rounded ones, step by step.

    Accumulators and past inputs of filters are rounded: what
    :func:`stateline.layers.stored_state.stored` keeps in another dtype. Memory does not grow with
    the length unless the state of the model does.

    Args:
        model: A language model in evaluation mode.
        roundings: Names of :data:`ROUNDINGS`.
        length: Number of tokens. Results are given after 16, 64, 256, ... tokens and at the end.
        seed: Seed of the tokens.

    Raises:
        InputError: If there is no such rounding, nothing in the state is rounded, or the length is
            not positive or beyond the model's.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <...>
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=16, d_model=8)).eval()
        >>> [(d.length, d.state["int8"] < 0.1) for d in drift(model, ["int8"], length=100)]
        [(16, True), (64, True), (100, True)]
    """
    check_model(model)
    if unknown := [name for name in roundings if name not in ROUNDINGS]:
        raise InputError(f"a state can be rounded to {', '.join(ROUNDINGS)}, got {unknown[0]!r}")
    if length < 1:
        raise InputError(f"the length must be at least 1, got {length}")
    state = model.init_state(1 + len(roundings), capacity=length)
    kept = storable_parts(state)
    if not kept:
        raise InputError(
            "nothing in the state of this model is rounded: it has neither accumulators nor past "
            "inputs of filters"
        )
    rounded = [
        (ROUNDINGS[name], leaf[row : row + 1])
        for row, name in enumerate(roundings, 1)
        for leaf in kept
    ]
    step, random = Decoder(model).ready.step_, torch.Generator("cpu").manual_seed(seed)
    change = torch.zeros(len(roundings), dtype=torch.float64, device=model.device)
    done = reported = 0
    while done < length:
        end = min(length, _next(done), done + AT_ONCE)
        size = end - done, 1
        tokens = torch.randint(model.config.vocab_size, size, generator=random, device="cpu")
        for token in tokens.to(change.device):
            logits = step(token.expand(1 + len(roundings)), state)
            for rounding, part in rounded:
                part.copy_(rounding(part))
            chances = logits.double().softmax(dim=-1)
            change += (chances[1:] - chances[0]).abs().sum(dim=-1) / 2
        done = end
        if done in (length, _next(done - 1)):
            leaves = torch.cat([leaf.flatten(1).double() for leaf in kept], dim=1)
            apart = (leaves[1:] - leaves[0]).norm(dim=1) / leaves[0].norm()
            found = (change / (done - reported)).tolist(), apart.tolist()
            yield Drift(done, *(dict(zip(roundings, part, strict=True)) for part in found))
            reported = done
            change.zero_()


def _next(length: int) -> int:
    """The first reported length after this one."""
    reported = FIRST
    while reported <= length:
        reported *= FACTOR
    return reported
