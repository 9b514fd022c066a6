"""How layers begin that replace others in a trained model."""

from collections.abc import Iterable, Iterator, Sequence
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

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""What may be added to the mean square of every feature, in units of the mean of all."""

PARTS = 2
"""Parts of the text, of which each is left out once to choose the ridge."""

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
    for index, branch, other in _pairs(student, teacher):
        if not alike(branch.layer, other.layer):
            yield index, branch, other


def changed(student: LanguageModel, teacher: LanguageModel) -> set[int]:
    """The blocks whose layers are like the old ones, with other settings."""
    return {
        index
        for index, branch, other in _pairs(student, teacher)
        if alike(branch.layer, other.layer) and branch.layer.settings != other.layer.settings
    }


def _pairs(student: LanguageModel, teacher: LanguageModel) -> Iterator[tuple[int, Branch, Branch]]:
    pairs = zip(student.stack.links, teacher.stack.links, strict=True)
    for index, blocks in enumerate(pairs):
        for branch, other in zip(*map(_branches, blocks), strict=True):
            yield index, branch, other


def beside(layer: AnyLayer, old: AnyLayer) -> tuple[list[AnyLayer], list[int]]:
    """The layers that replace heads of an old layer, and the numbers of these heads.

    Attention inside ``parallel`` that stays replaces none.
    """
    heads = list(range(getattr(old, "n_heads", 1)))
    if not isinstance(layer, Parallel):
        return [layer], heads
    stay = staying(layer, old)
    kept = _kept(layer, stay)
    others = [part for part in layer.links if part not in stay]
    return others, [head for head in heads if head not in kept]


def _kept(layer: Parallel, stay: Iterable[SoftmaxHeads]) -> list[int]:
    """The numbers of the heads that stay: by default the first ones."""
    return layer.keeps or list(range(sum(part.n_heads for part in stay)))


def _branches(block: AnyLayer) -> list[Branch]:
    if isinstance(block, Branch):
        return [block]
    if isinstance(block, ParallelResidual):
        return [branch for branch in block.branches if isinstance(branch, Branch)]
    return []


class _Fit:
    """The least-squares problem of the last maps of one layer."""

    def __init__(self, block: int, branch: Branch, other: Branch) -> None:
        self.block, self.branch, self.other = block, branch, other
        self.layer = branch.layer
        parts, self.staying = [self.layer], staying(self.layer, other.layer)
        if isinstance(self.layer, Parallel):
            own = self.layer.links if self.layer.join == "sum" else ()
            parts = [part for part in own if part not in self.staying]
        lasts = [getattr(part, "out_proj", None) for part in parts]
        self.lasts = [last for last in lasts if isinstance(last, nn.Linear)]
        self.possible = bool(parts) and len(self.lasts) == len(parts)
        self.widths = [last.in_features for last in self.lasts]

    def solve(self, streams: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Set the last maps, by batches of inputs of the block in the student and the teacher."""
        width, outputs, double = sum(self.widths), self.branch.d_model, torch.float64
        sums = [
            (torch.zeros(width, width, dtype=double), torch.zeros(width, outputs, dtype=double))
            for _ in range(PARTS)
        ]
        for own, old in streams:
            for (gram, products), (f, y) in zip(sums, self._parts(own, old), strict=False):
                gram.addmm_(f.T, f)
                products.addmm_(f.T, y)
        maps = best_map(sums).T.split(self.widths, dim=1)
        for last, weight in zip(self.lasts, maps, strict=True):
            last.weight.copy_(weight)
            if last.bias is not None:
                last.bias.zero_()

    def _parts(
        self,
        own: Float[Tensor, "batch length d_model"],
        old: Float[Tensor, "batch length d_model"],
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Parts of the inputs of the last maps, and the outputs that are wanted."""
        (x, _), (its, _) = self.branch.enter(own), self.other.enter(old)
        features: list[Tensor] = []
        with ExitStack() as hooks:
            for last in self.lasts:
                keep = last.register_forward_pre_hook(lambda _, given: features.append(given[0]))
                hooks.callback(keep.remove)
            self.layer(x)
        inputs = torch.cat(features, dim=-1).flatten(0, 1).double().cpu()
        wanted = self.other.layer(its) - sum(part(x) for part in self.staying)
        parts = inputs.chunk(PARTS), wanted.flatten(0, 1).double().cpu().chunk(PARTS)
        return zip(*parts, strict=True)


def best_map(
    sums: Sequence[tuple[Float[Tensor, "feature feature"], Float[Tensor, "feature output"]]],
) -> Float[Tensor, "feature output"]:
    """The ridge regression whose ridge is best for parts of the data that are left out.

    It is zero if every ridge is worse for them than zero.

    Args:
        sums: For each part, sums of products of features with features, and with outputs.
    """
    gram, products = (sum(parts) for parts in zip(*sums, strict=True))
    errors = list[float]()
    for ridge in RIDGES:
        found = [(_ridge(gram - g, products - p, ridge), g, p) for g, p in sums]
        errors.append(sum(((g @ w - 2 * p) * w).sum().item() for w, g, p in found))
    if min(errors) >= 0:
        return torch.zeros_like(products)
    return _ridge(gram, products, RIDGES[errors.index(min(errors))])


def _ridge(gram: Tensor, products: Tensor, ridge: float) -> Tensor:
    least = ridge * gram.diagonal().mean() + torch.finfo(torch.float32).tiny
    return torch.linalg.solve(gram + least * torch.eye(len(gram), dtype=gram.dtype), products)


@torch.no_grad()
def fit_outputs(
    student: LanguageModel,
    teacher: LanguageModel,
    batches: Iterable[Int[Tensor, "batch length"]],
) -> None:
    r"""Set the last maps of replaced layers so that they give the outputs of the old layers.

    With the inputs f of the last map of a new layer, behind the new layers before it, and the
    outputs y of the old one in the teacher, the map is

    .. math::
        W = \arg\min_W \sum_t \| W f_t - y_t \|^2 + \lambda \| W \|^2, \qquad
        \lambda = r\, \mathrm{mean}_i \sum_t f_{t,i}^2

    and the outputs of heads that stay are subtracted from y. The ridge r is that of ``RIDGES``
    which is best for halves of the text that are left out. If each is worse for them than W = 0,
    this is the map: the layer begins as if it were not there. Layers without a last map stay as
    they are.

    Args:
        student: Its layers stand in the places of the teacher's; their weights are changed.
        teacher: The model that the student starts from.
        batches: Tokens; as many batches are read as the layers have features, 8 times.
    """
    fits = _fits(student, teacher)
    if not fits:
        return
    wanted, old = PER_FEATURE * max(sum(fit.widths) for fit in fits), list[Tensor]()
    for tokens in batches:
        tokens = tokens[:, : teacher.max_len].to(teacher.device)
        old.append(next(teacher.streams(tokens)))
        wanted -= tokens.numel()
        if wanted <= 0:
            break
    own = list(old)
    links = zip(student.stack.links, teacher.stack.links, strict=True)
    for block, (link, other) in enumerate(links):
        here = [fit for fit in fits if fit.block == block]
        for fit in here:
            fit.solve(zip(own, old, strict=True))
        fits = [fit for fit in fits if fit.block > block]
        if not fits:
            break
        same = not here and all(map(torch.Tensor.is_set_to, own, old))
        old = [other(stream) for stream in old]
        own = list(old) if same else [link(stream) for stream in own]


def _fits(student: LanguageModel, teacher: LanguageModel) -> list[_Fit]:
    return [fit for pair in replaced(student, teacher) if (fit := _Fit(*pair)).possible]


def fitted(student: LanguageModel, teacher: LanguageModel) -> set[int]:
    """The blocks whose layers :func:`fit_outputs` fits: those with last maps."""
    return {fit.block for fit in _fits(student, teacher)}


def take_heads(student: LanguageModel, teacher: LanguageModel) -> set[int]:
    """Give the heads of attention to new layers that begin better with them.

    Attention inside ``parallel`` becomes the heads that stay; layers beside it take the queries,
    keys and values of the others.

    Returns:
        The blocks in which a recurrence takes queries, keys and values.

    Raises:
        InputError: If there are no such heads, or attention has other settings.
    """
    taken = set[int]()
    for block, branch, other in replaced(student, teacher):
        layer, old = branch.layer, other.layer
        if not isinstance(old, SoftmaxHeads):
            continue
        if isinstance(layer, Parallel):
            _divide(layer, old)
        parts, heads = beside(layer, old)
        for part in parts:
            if isinstance(part, TakesHeads) and part.take(old.head_maps().of(heads)):
                taken.add(block)
    return taken


def staying(layer: AnyLayer, old: AnyLayer) -> list[SoftmaxHeads]:
    """The attention inside of ``parallel`` that has heads like the old layer's."""
    if not (isinstance(layer, Parallel) and isinstance(old, SoftmaxHeads)):
        return []
    inner = [part for part in layer.links if isinstance(part, SoftmaxHeads)]
    return [part for part in inner if part.can_be_part_of(old)][:1]


def _divide(layer: Parallel, old: SoftmaxHeads) -> None:
    stay = staying(layer, old)
    count, kept = sum(part.n_heads for part in stay), _kept(layer, stay)
    if len(kept) != count or max(kept, default=0) >= old.n_heads:
        raise InputError(
            f"parallel keeps {kept} of {old.n_heads} heads of {old.d_head}, from 0: its attention "
            "must have as many, of the same width, no shared keys, and the settings of the old "
            f"layer, as attention(n_heads={len(kept)}, n_kv_heads={len(kept)}, d_head={old.d_head})"
        )
    for part in stay:
        part.take_heads(old, kept)
