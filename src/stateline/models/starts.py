"""How layers begin that replace others in a trained model."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer
from stateline.layers.compose import Branch, ParallelResidual
from stateline.layers.mixers.heads import SoftmaxHeads, TakesHeads
from stateline.layers.wrappers.parallel import Parallel
from stateline.models.language_model import LanguageModel

RIDGE = 1e-3
"""What is added to the mean square of every feature, in units of the mean of all."""

PER_FEATURE = 8
"""Positions that are read for each feature."""


def alike(layer: AnyLayer, other: AnyLayer) -> bool:
    """Whether weights of the same names do the same in both layers: of one kind, or attention.

    Example:
        >>> from stateline.layers import H3, Attention, SlidingAttention
        >>> alike(Attention(8), SlidingAttention(8)), alike(H3(8), Attention(8))
        (True, False)
    """
    both = isinstance(layer, SoftmaxHeads) and isinstance(other, SoftmaxHeads)
    return both or type(layer) is type(other)


def replaced(
    student: LanguageModel, teacher: LanguageModel
) -> Iterator[tuple[int, Branch, Branch]]:
    """The branches whose layers are not alike: index of the block, and the branch in both."""
    pairs = zip(student.stack.links, teacher.stack.links, strict=True)
    for index, blocks in enumerate(pairs):
        own, its = map(_branches, blocks)
        for branch, other in zip(own, its, strict=True):
            if not alike(branch.layer, other.layer):
                yield index, branch, other


def beside(layer: AnyLayer, old: AnyLayer) -> tuple[list[AnyLayer], list[int]]:
    """The layers that replace heads of an old layer, and the numbers of these heads.

    Attention inside ``parallel`` that stays replaces none.
    """
    heads = list(range(getattr(old, "n_heads", 1)))
    if not isinstance(layer, Parallel):
        return [layer], heads
    staying = _staying(layer, old)
    kept = _kept(layer, staying)
    others = [part for part in layer.links if part not in staying]
    return others, [head for head in heads if head not in kept]


def _kept(layer: Parallel, staying: Iterable[SoftmaxHeads]) -> list[int]:
    """The numbers of the heads that stay: by default the first ones."""
    return layer.keeps or list(range(sum(part.n_heads for part in staying)))


def _branches(block: AnyLayer) -> list[Branch]:
    if isinstance(block, Branch):
        return [block]
    if isinstance(block, ParallelResidual):
        return [branch for branch in block.branches if isinstance(branch, Branch)]
    return []


class _Fit:
    """The least-squares problem of the last maps of one layer."""

    def __init__(self, block: int, branch: Branch, other: Branch) -> None:
        self.block, self.layer, self.other = block, branch.layer, other
        parts, self.staying = [self.layer], list[SoftmaxHeads]()
        if isinstance(self.layer, Parallel):
            self.staying = _staying(self.layer, other.layer)
            own = self.layer.links if self.layer.join == "sum" else ()
            parts = [part for part in own if part not in self.staying]
        lasts = [getattr(part, "out_proj", None) for part in parts]
        self.lasts = [last for last in lasts if isinstance(last, nn.Linear)]
        self.possible = bool(parts) and len(self.lasts) == len(parts)
        self.widths = [last.in_features for last in self.lasts]
        width = sum(self.widths)
        self.gram = torch.zeros(width, width, dtype=torch.float64)
        self.products = torch.zeros(width, branch.d_model, dtype=torch.float64)

    def add(self, stream: Float[Tensor, "batch length d_model"]) -> None:
        """Read the inputs of the teacher's block."""
        x, _ = self.other.enter(stream)
        features: list[Tensor] = []
        with ExitStack() as hooks:
            for last in self.lasts:
                keep = last.register_forward_pre_hook(lambda _, given: features.append(given[0]))
                hooks.callback(keep.remove)
            self.layer(x)
        inputs = torch.cat(features, dim=-1).flatten(0, 1).double().cpu()
        self.gram.addmm_(inputs.T, inputs)
        wanted = self.other.layer(x) - sum(part(x) for part in self.staying)
        self.products.addmm_(inputs.T, wanted.flatten(0, 1).double().cpu())

    def solve(self) -> None:
        """Set the last maps."""
        diagonal = self.gram.diagonal()
        diagonal.add_(RIDGE * diagonal.mean() + torch.finfo(torch.float32).tiny)
        maps = torch.linalg.solve(self.gram, self.products).T.split(self.widths, dim=1)
        for last, weight in zip(self.lasts, maps, strict=True):
            last.weight.copy_(weight)
            if last.bias is not None:
                last.bias.zero_()


@torch.no_grad()
def fit_outputs(
    student: LanguageModel,
    teacher: LanguageModel,
    batches: Iterable[Int[Tensor, "batch length"]],
) -> None:
    r"""Set the last maps of replaced layers so that they give the outputs of the old layers.

    With the inputs f of the last map of a new layer, and the outputs y of the old one, both on the
    teacher's inputs of the layer, the map is

    .. math::
        W = \arg\min_W \sum_t \| W f_t - y_t \|^2 + \lambda \| W \|^2, \qquad
        \lambda = 10^{-3}\, \mathrm{mean}_i \sum_t f_{t,i}^2

    and the outputs of heads that stay are subtracted from y. So a layer without use for its
    features begins near zero, as if it were not there. One pass of the teacher serves all layers.
    Layers without a last map stay as they are.

    Args:
        student: Its layers stand in the places of the teacher's; their weights are changed.
        teacher: The model that the student starts from.
        batches: Tokens; as many batches are read as the layers have features, 8 times.
    """
    fits = [fit for pair in replaced(student, teacher) if (fit := _Fit(*pair)).possible]
    if not fits:
        return
    wanted = PER_FEATURE * max(len(fit.gram) for fit in fits)
    for tokens in batches:
        tokens = tokens[:, : teacher.max_len].to(teacher.embedding.weight.device)
        streams = teacher.hidden_states(tokens)
        for fit in fits:
            fit.add(streams[fit.block])
        wanted -= tokens.numel()
        if wanted <= 0:
            break
    for fit in fits:
        fit.solve()


def take_heads(student: LanguageModel, teacher: LanguageModel) -> None:
    """Give the heads of attention to new layers that begin better with them.

    Attention inside ``parallel`` becomes the heads that stay; layers beside it take the queries,
    keys and values of the others.

    Raises:
        InputError: If there are no such heads, or attention has other settings.
    """
    for _, branch, other in replaced(student, teacher):
        old = other.layer
        if isinstance(old, SoftmaxHeads) and isinstance(branch.layer, TakesHeads):
            branch.layer.take(old.head_maps())
        if isinstance(old, SoftmaxHeads) and isinstance(branch.layer, Parallel):
            _divide(branch.layer, old)


def _staying(layer: Parallel, old: AnyLayer) -> list[SoftmaxHeads]:
    """The attention inside that has heads like the old layer's."""
    inner = [part for part in layer.links if isinstance(part, SoftmaxHeads)]
    return [part for part in inner if isinstance(old, SoftmaxHeads) and part.can_be_part_of(old)][
        :1
    ]


def _divide(layer: Parallel, old: SoftmaxHeads) -> None:
    staying = _staying(layer, old)
    count, kept = sum(part.n_heads for part in staying), _kept(layer, staying)
    if len(kept) != count or max(kept, default=0) >= old.n_heads:
        raise InputError(
            f"parallel keeps {kept} of {old.n_heads} heads of {old.d_head}, from 0: its attention "
            "must have as many, of the same width, no shared keys, and the settings of the old "
            f"layer, as attention(n_heads={len(kept)}, n_kv_heads={len(kept)}, d_head={old.d_head})"
        )
    others = [head for head in range(old.n_heads) if head not in kept]
    for part in staying:
        part.take_heads(old, kept)
    for beside in layer.links:
        if isinstance(beside, TakesHeads):
            beside.take(old.head_maps().of(others))
