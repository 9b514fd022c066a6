"""Initial weights of whole models."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor, nn

from stateline.layers import Branch
from stateline.layers.context import AttendsToContext
from stateline.layers.mixers.feed_forward import Positionwise
from stateline.models.config import Init


class _Scheme(NamedTuple):
    """How the weights of a model begin.

    Attributes:
        linear: Standard deviation of linear maps: a number, ``width`` (by the model's width),
            ``fan_in`` (by the width of their input), or ``None`` for PyTorch's uniform
            distribution.
        embedding: Standard deviation of embeddings: a number, or ``width``.
        scaled: Layers whose last map is divided by the root of the number of branches.
        uniform: Whether embeddings have a uniform distribution, of the same deviation.
    """

    linear: float | Literal["width", "fan_in"] | None
    embedding: float | Literal["width"]
    scaled: tuple[type, ...]
    uniform: bool = False


_ALL = (nn.Module,)

_SCHEMES: Mapping[Init, _Scheme] = {
    "width": _Scheme("width", "width", _ALL),
    "gpt2": _Scheme(0.02, 0.02, _ALL),
    # The official code misses the name of H3's output map, and of S4D's, in this step.
    "h3": _Scheme(0.02, 0.02, (AttendsToContext, Positionwise)),
    "neox": _Scheme(0.02, 0.02, ()),
    "mamba": _Scheme(None, 0.02, _ALL),
    "staircase": _Scheme(None, 1.0, _ALL),
    "t5": _Scheme("fan_in", 1.0, ()),
    "lstm": _Scheme(None, 0.1 / 3**0.5, (), uniform=True),
}


def initialise(model: nn.Module, d_model: int, init: Init = "width") -> None:
    r"""Initialise linear maps and embeddings; all other parameters keep their layers' values.

    ==============  ====================================  ==================  ======================
    ``init``        linear maps                           embeddings          divided by the root of
                                                                              the number of branches
    ==============  ====================================  ==================  ======================
    ``width``       normal, :math:`\sqrt{2/(5\,d)}`       the same            all last maps
    ``gpt2``        normal, 0.02                          normal, 0.02        all last maps
    ``h3``          normal, 0.02                          normal, 0.02        attention, MLP
    ``neox``        normal, 0.02                          normal, 0.02        none
    ``mamba``       PyTorch's uniform distribution        normal, 0.02        all last maps
    ``staircase``   PyTorch's, also biases                normal, 1           all last maps, biases
    ``t5``          normal, :math:`1/\sqrt{d_{in}}`       normal, 1           none
    ``lstm``        PyTorch's uniform distribution        uniform, ±0.1       none
    ==============  ====================================  ==================  ======================

    Biases are zero, except with ``staircase``. :math:`d` is the width of the model, and a last map
    is the last map of a residual branch. The number of branches counts a shared core once.

    References:
        ``width``: Nguyen and Salazar, "Transformers without Tears", 2019; ``gpt2``: Radford et al.,
        2019; ``h3``: HazyResearch/H3; ``neox``: the models of "Repeat After Me"; ``mamba``:
        state-spaces/mamba; ``staircase``: facebookresearch/transformer-sequential, which divides
        with pre-norm alone; ``t5``: Raffel et al., 2020, the family of the Block-Recurrent code,
        without its small query maps; ``lstm``: the LSTM of "Repeat After Me", whose code leaves the
        recurrent weights as PyTorch draws them.
    """
    scheme = _SCHEMES[init]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            std = _deviation(scheme.embedding, d_model, d_model)
            bound = std * 3**0.5
            if scheme.uniform:
                nn.init.uniform_(module.weight, -bound, bound)
            else:
                nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and scheme.linear is not None:
            std = _deviation(scheme.linear, d_model, module.in_features)
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None and init != "staircase":
            nn.init.zeros_(module.bias)
    branches = max(1, sum(isinstance(module, Branch) for module in model.modules()))
    for layer in model.modules():
        last = getattr(layer, "out_proj", None)
        if isinstance(last, nn.Linear) and isinstance(layer, scheme.scaled):
            _scale_down(last, scheme, d_model, branches**0.5)
        maps = [getattr(layer, name) for name in getattr(layer, "maps", ())]
        for weight in maps:
            scaled = weight is maps[-1] and isinstance(layer, scheme.scaled)
            _draw(weight, scheme, d_model, branches**0.5 if scaled else 1.0)


def _draw(weight: Tensor, scheme: _Scheme, d_model: int, divisor: float) -> None:
    """Draw a map that a layer owns like those of ``nn.Linear``."""
    d_input = weight.shape[-1]
    if scheme.linear is None:
        bound = d_input**-0.5 / divisor
        nn.init.uniform_(weight, -bound, bound)
    else:
        nn.init.normal_(weight, std=_deviation(scheme.linear, d_model, d_input) / divisor)


def _scale_down(last: nn.Linear, scheme: _Scheme, d_model: int, root: float) -> None:
    if scheme.linear is None:
        for parameter in last.parameters():
            parameter.data.div_(root)
    else:
        std = _deviation(scheme.linear, d_model, last.in_features)
        nn.init.normal_(last.weight, std=std / root)


def _deviation(rule: float | Literal["width", "fan_in"], d_model: int, d_input: int) -> float:
    if rule == "width":
        return (2 / (5 * d_model)) ** 0.5
    return d_input**-0.5 if rule == "fan_in" else rule
