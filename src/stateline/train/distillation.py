r"""Losses that compare a model with its teacher.

With logits z of the student and t of the teacher at a position, and a temperature T,

.. math:: L_{\mathrm{logits}} = T^2\, \mathrm{KL}\bigl(\mathrm{softmax}(t / T) \,\|\,
    \mathrm{softmax}(z / T)\bigr).

The other losses train each layer that replaces another by itself, on the teacher's input x of the
layer, with the outputs f of the new and g of the old one (``outputs``), or with the outputs of
whole blocks up to the next mixer (``blocks``):

.. math:: L_{\mathrm{outputs}} = \sum_{\mathrm{layers}} \| f(x) - g(x) \|_2, \qquad
    L_{\mathrm{squares}} = \frac{1000}{\#\mathrm{layers}} \sum_{\mathrm{layers}} \mathrm{mean}
    \bigl( (f(x) - g(x))^2 \bigr).

References:
    ``blocks``, ``outputs`` and ``logits``: Bick et al., "Transformers to SSMs" (MOHAWK), NeurIPS
    2024, stages 2 and 3; ``squares``: Zhang et al., "LoLCATs", ICLR 2025, section 3.2, there of
    the outputs before the last map.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.generate.runs import load_run
from stateline.layers.compose import inside
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.models.starts import replaced
from stateline.tasks.base import IGNORE
from stateline.train.config import TrainConfig

SQUARES = 1000.0
"""Factor of the mean square, as in LoLCATs."""


def logits_loss(
    student: Float[Tensor, "position vocab"],
    teacher: Float[Tensor, "position vocab"],
    temperature: float = 1.0,
) -> Float[Tensor, " position"]:
    """The divergence of the student's distribution from the teacher's, in nats.

    Example:
        >>> z = torch.tensor([[1.0, 2.0]])
        >>> logits_loss(z, z)
        tensor([0.])
    """
    own, its = ((z / temperature).log_softmax(dim=-1) for z in (student, teacher))
    return temperature**2 * F.kl_div(own, its, reduction="none", log_target=True).sum(dim=-1)


def distance(
    student: Float[Tensor, "batch length d_model"], teacher: Float[Tensor, "batch length d_model"]
) -> Float[Tensor, ""]:
    """The mean over positions of the norm of the difference."""
    return torch.linalg.vector_norm(student - teacher, dim=-1).mean()


class Distillation:
    """The loss of a student on a batch; the teacher is no part of the module that is trained.

    Args:
        teacher: The teacher; its weights do not change.
        config: What is compared, and the temperature.
    """

    def __init__(self, teacher: LanguageModel, config: TrainConfig) -> None:
        self.teacher, self.match = teacher.eval().requires_grad_(False), config.match
        self.temperature = config.temperature

    def __call__(
        self,
        student: Any,
        tokens: Int[Tensor, "batch length"],
        targets: Int[Tensor, "batch length"],
        starts: Any = None,
    ) -> Float[Tensor, ""]:
        """The mean loss, times the number of targets, which the loop divides by."""
        asked = targets != IGNORE
        if self.match == "logits":
            own = student(tokens, starts=starts).float()
            with torch.no_grad():
                its = self.teacher(tokens, starts=starts).float()
            return logits_loss(own[asked], its[asked], self.temperature).sum()
        losses = [*self._layers(student, tokens)]
        total = torch.stack(losses).sum()
        if self.match == "squares":
            total = SQUARES / len(losses) * total
        return total * asked.sum()

    def _layers(self, student: LanguageModel, tokens: Tensor) -> Iterator[Tensor]:
        """The loss of each replaced layer that can be trained."""
        with torch.no_grad():
            streams = self.teacher.hidden_states(tokens)
        for block, branch, other in replaced(student, self.teacher):
            if not any(weight.requires_grad for weight in branch.layer.parameters()):
                continue
            if self.match == "blocks":
                end = _end(student, block)
                own = streams[block]
                for link in student.stack.links[block:end]:
                    own = link(own)
                yield distance(own, streams[end])
                continue
            with torch.no_grad():
                x, _ = other.enter(streams[block])
                its = other.layer(x)
            own = branch.layer(x)
            yield F.mse_loss(own, its) if self.match == "squares" else distance(own, its)


def _end(model: LanguageModel, block: int) -> int:
    """The next block with a mixer, or the number of blocks."""
    links = model.stack.links
    later = range(block + 1, len(links))
    mixes = (n for n in later if not inside(links[n]).is_feed_forward)
    return next(mixes, len(links))


@contextmanager
def frozen(model: AnyModel, config: TrainConfig, teacher: LanguageModel | None) -> Iterator[None]:
    """Freeze the weights that are not trained, and free them at the end.

    Raises:
        InputError: If ``freeze`` fits no weight.
    """
    names = dict(model.named_parameters())
    fixed = {weight for pattern in config.freeze.split() for weight in _named(names, pattern)}
    if teacher is not None and config.match != "logits":
        assert isinstance(model, LanguageModel)
        fixed |= {*model.parameters()} - _trained(model, teacher, config.match)
    changed = [weight for weight in fixed if weight.requires_grad]
    for weight in changed:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in changed:
            weight.requires_grad_(True)


def read_teacher(model: AnyModel, config: TrainConfig) -> LanguageModel | None:
    """The model in the folder ``teacher``, in float32 on the device of the student, if one is set.

    Raises:
        InputError: If there is none, or what is compared with it does not exist in both models.
    """
    if config.teacher is None:
        return None
    if not isinstance(model, LanguageModel):
        raise InputError("only language models have teachers: leave out teacher")
    device = model.embedding.weight.device
    teacher, _ = load_run(config.teacher, device=device, dtype=torch.float32)
    own, its = model.config.vocab_size, teacher.config.vocab_size
    if own != its:
        raise InputError(f"a teacher must have the tokens of its student, {own}, got {its}")
    if config.match != "logits":
        _check_layers(model, teacher, config)
    return teacher


def _check_layers(model: LanguageModel, teacher: LanguageModel, config: TrainConfig) -> None:
    blocks = [len(each.stack.links) for each in (model, teacher)]
    if blocks[0] != blocks[1] or not [*replaced(model, teacher)]:
        raise InputError(
            f"match={config.match} trains layers that replace those of the teacher, in their "
            "places, got no such layers: take match=logits"
        )
    if config.parallel == "fsdp" or config.shard not in (None, 1):
        raise InputError(f"match={config.match} calls single layers, which fsdp does not allow")


def _named(names: dict[str, nn.Parameter], pattern: str) -> list[nn.Parameter]:
    found = [weight for name, weight in names.items() if fnmatchcase(name, pattern)]
    if not found:
        some = ", ".join([*names][:3])
        raise InputError(f"freeze={pattern!r:.60} fits no weight: names are such as {some}")
    return found


def _trained(model: LanguageModel, teacher: LanguageModel, match: str) -> set[nn.Parameter]:
    """What a loss of single layers trains."""
    kept = set[nn.Parameter]()
    for block, branch, _ in replaced(model, teacher):
        kept |= {*branch.layer.parameters()}
        for link in model.stack.links[block : _end(model, block)] if match == "blocks" else ():
            kept |= {*link.parameters()}
    return kept
