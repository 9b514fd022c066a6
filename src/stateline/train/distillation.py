r"""Losses that compare a model with its teacher.

With logits z of the student and t of the teacher at a position, and a temperature T,

.. math:: L_{\mathrm{logits}} = T^2\, \mathrm{KL}\bigl(\mathrm{softmax}(t / T) \,\|\,
    \mathrm{softmax}(z / T)\bigr).

The other losses train each layer that replaces another by itself, on the teacher's input x of the
layer, with the outputs f of the new and g of the old one (``outputs``), or with the outputs of
whole blocks up to the next mixer (``blocks``), or with the weights M and N with which the heads of
both sum values (``mixing``):

.. math:: L_{\mathrm{outputs}} = \sum_{\mathrm{layers}} \| f(x) - g(x) \|_2, \qquad
    L_{\mathrm{squares}} = \frac{1000}{\#\mathrm{layers}} \sum_{\mathrm{layers}} \mathrm{mean}
    \bigl( (f(x) - g(x))^2 \bigr), \qquad
    L_{\mathrm{mixing}} = \sum_{\mathrm{layers}} \| M(x) - N(x) \|_F.

Norms are means over positions, or over rows and heads. Only the layers that are compared run, and
the teacher only up to the last of them.

References:
    ``mixing``, ``outputs``, ``blocks`` and ``logits``: Bick et al., "Transformers to SSMs"
    (MOHAWK), NeurIPS 2024, stages 1 to 3; ``squares``: Zhang et al., "LoLCATs", ICLR 2025, section
    3.2, there of the outputs before the last map.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer
from stateline.layers.compose import inside
from stateline.layers.mixers.heads import MixesValues
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.models.starts import beside, replaced
from stateline.tasks.base import IGNORE
from stateline.train.config import TrainConfig
from stateline.train.optimizer import named
from stateline.train.teacher import Outputs, Teacher, load_teacher, teacher_hash

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
    """The mean over positions of the norm of the difference, at least in float32."""
    return torch.linalg.vector_norm(_precise(student - teacher), dim=-1).mean()


def matrix_distance(
    student: Float[Tensor, "batch head length length"],
    teacher: Float[Tensor, "batch head length length"],
) -> Float[Tensor, ""]:
    """The mean over rows and heads of the Frobenius norm of the difference, at least in float32."""
    return torch.linalg.matrix_norm(_precise(student - teacher)).mean()


def _precise(x: Tensor) -> Tensor:
    """The same in a precision in which a mean over a batch is not rounded to a few digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Distillation:
    """The loss of a student on a batch; the teacher is no part of the module that is trained.

    Args:
        teacher: The teacher; its weights do not change.
        config: What is compared, the temperature, and where the teacher's outputs are kept.
    """

    def __init__(self, teacher: Teacher, config: TrainConfig) -> None:
        self.teacher, self.match = teacher.eval().requires_grad_(False), config.match
        self.temperature, folder = config.temperature, config.teacher_outputs
        self.outputs = Outputs(folder, teacher_hash(config.teacher) if folder else "")

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
            its = self._logits(tokens, starts)
            return logits_loss(own[asked], its[asked], self.temperature).sum()
        losses = [*self._layers(student, tokens)]
        total = torch.stack(losses).sum()
        if self.match == "squares":
            total = SQUARES / len(losses) * total
        return total * asked.sum()

    @torch.no_grad()
    def _logits(self, tokens: Tensor, starts: Any) -> Tensor:
        batch = [tokens] if starts is None else [tokens, starts]
        found = self.outputs.of(
            "logits", batch, lambda: {"logits": self.teacher(tokens, starts=starts).float()}
        )
        return found["logits"]

    @torch.no_grad()
    def _streams(self, tokens: Tensor, blocks: set[int]) -> Mapping[str, Tensor]:
        """The teacher's inputs of some blocks, by their numbers."""

        def compute() -> Mapping[str, Tensor]:
            assert isinstance(self.teacher, LanguageModel)
            streams = zip(range(max(blocks) + 1), self.teacher.streams(tokens), strict=False)
            return {str(block): stream for block, stream in streams if block in blocks}

        return self.outputs.of(f"streams {sorted(blocks)}", [tokens], compute)

    def _layers(self, student: LanguageModel, tokens: Tensor) -> Iterator[Tensor]:
        """The loss of each replaced layer that can be trained."""
        assert isinstance(self.teacher, LanguageModel)
        found = [
            (block, _end(student, block), branch, other)
            for block, branch, other in replaced(student, self.teacher)
            if any(weight.requires_grad for weight in branch.layer.parameters())
        ]
        whole = self.match == "blocks"
        needed = {place for block, end, *_ in found for place in ([block, end][: 1 + whole])}
        streams = self._streams(tokens, needed)
        for block, end, branch, other in found:
            own = streams[str(block)]
            if whole:
                for link in student.stack.links[block:end]:
                    own = link(own)
                yield distance(own, streams[str(end)])
            else:
                with torch.no_grad():
                    x, _ = other.enter(own)
                yield self._layer(branch.layer, other.layer, x)

    def _layer(self, layer: AnyLayer, old: AnyLayer, x: Tensor) -> Tensor:
        """The loss of a layer on its input."""
        if self.match == "mixing":
            return _mixing_loss(layer, old, x)
        with torch.no_grad():
            its = old(x)
        own = layer(x)
        return F.mse_loss(own, its) if self.match == "squares" else distance(own, its)


def _mixing_loss(layer: AnyLayer, old: AnyLayer, x: Tensor) -> Tensor:
    parts, heads = beside(layer, old)
    with torch.no_grad():
        its = _mixer(old).mixing(x)[:, heads]
    own = torch.cat([_mixer(part).mixing(x) for part in parts], dim=1)
    if own.shape != its.shape:
        raise InputError(
            f"match=mixing compares heads with those that they replace: a new layer has "
            f"{own.shape[1]} for {its.shape[1]}; give it as many, or take match=outputs"
        )
    return matrix_distance(own, its)


def _mixer(layer: AnyLayer) -> MixesValues:
    if isinstance(layer, MixesValues):
        return layer
    raise InputError(
        "match=mixing needs layers whose heads sum values with weights, got "
        f"{type(layer).__name__}: take match=outputs"
    )


def _end(model: LanguageModel, block: int) -> int:
    """The next block with a mixer, or the number of blocks."""
    links = model.stack.links
    later = range(block + 1, len(links))
    mixes = (n for n in later if not inside(links[n]).is_feed_forward)
    return next(mixes, len(links))


@contextmanager
def frozen(model: AnyModel, config: TrainConfig, teacher: Teacher | None) -> Iterator[None]:
    """Freeze the weights that are not trained, and free them at the end.

    Raises:
        InputError: If ``freeze`` fits no weight.
    """
    patterns = config.freeze.split()
    fixed = {weight for pattern in patterns for weight in named(model, "freeze", pattern)}
    if config.match != "logits":
        assert isinstance(model, LanguageModel)
        assert isinstance(teacher, LanguageModel)
        fixed |= {*model.parameters()} - _trained(model, teacher, config.match)
    changed = [weight for weight in fixed if weight.requires_grad]
    for weight in changed:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in changed:
            weight.requires_grad_(True)


def read_teacher(model: AnyModel, config: TrainConfig) -> Teacher | None:
    """The teacher, in float32 on the device of the student, if one is set.

    Raises:
        InputError: If there is none, or what is compared with it does not exist in both models.
    """
    if config.teacher is None:
        return None
    if not isinstance(model, LanguageModel):
        raise InputError("only language models have teachers: leave out teacher")
    teacher = load_teacher(config.teacher, model.device)
    ours = teacher if isinstance(teacher, LanguageModel) else None
    own, its = model.config.vocab_size, teacher.config.vocab_size
    if own != its:
        raise InputError(f"a teacher must have the tokens of its student, {own}, got {its}")
    if config.match != "logits":
        if ours is None:
            raise InputError(
                f"match={config.match} compares layers, which a teacher of transformers does not "
                "show: give its folder without hf:, or take match=logits"
            )
        _check_layers(model, ours, config)
    return teacher


def share_weights(model: AnyModel, teacher: Teacher | None) -> None:
    """Keep frozen weights that are equal to the teacher's once for both."""
    if not isinstance(teacher, LanguageModel):
        return
    own = dict(model.named_parameters())
    for name, weight in teacher.named_parameters():
        same = own.get(name)
        if same is not None and not same.requires_grad and torch.equal(same, weight):
            weight.data = same.data


def _check_layers(model: LanguageModel, teacher: LanguageModel, config: TrainConfig) -> None:
    blocks = [len(each.stack.links) for each in (model, teacher)]
    if blocks[0] != blocks[1] or not [*replaced(model, teacher)]:
        raise InputError(
            f"match={config.match} trains layers that replace those of the teacher, in their "
            "places, got no such layers: take match=logits"
        )
    if config.parallel == "fsdp" or config.shard not in (None, 1):
        raise InputError(f"match={config.match} calls single layers, which fsdp does not allow")


def _trained(model: LanguageModel, teacher: LanguageModel, match: str) -> set[nn.Parameter]:
    """What a loss of single layers trains."""
    kept = set[nn.Parameter]()
    for block, branch, _ in replaced(model, teacher):
        kept |= {*branch.layer.parameters()}
        for link in model.stack.links[block : _end(model, block)] if match == "blocks" else ():
            kept |= {*link.parameters()}
    return kept
