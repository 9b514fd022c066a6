"""The size of a model, before it is built."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.factory import AnyModel, meta_model
from stateline.settings import check_kind

__all__ = ["count_parameters", "match_width", "meta_model", "training_bytes"]

WIDTH_STEP = 4
"""``match_width`` tries multiples of this."""

WIDEST = 2**20
"""``match_width`` refuses sizes that need a larger width than about this."""

WORKSPACE = 15.3
"""Numbers that oneDNN's LSTM keeps for each output: 15.0 to 15.6 were measured."""

_NEAR = 72
"""Widths that are tried one by one: the smallest ones, and those around the wanted size."""


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; tied parameters count once.

    Example:
        >>> config = ModelConfig("attention", vocab_size=10, d_model=8, feed_forward="none")
        >>> count_parameters(config)
        368
    """
    return sum(p.numel() for p in meta_model(config).parameters())


def training_bytes(
    model: AnyModel,
    batch_size: int,
    length: int,
    *,
    recompute: bool = False,
    loss_chunk: int | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
) -> dict[str, int]:
    """Estimate the memory of a training step, by what it is needed for.

    The backward pass of the cross entropy needs two tensors of the logits' shape, in float32 also
    under autocast: the logits and their gradients. Activations are counted by running the layers
    on tensors without data, as on a CPU with its kernels. Moments of the optimizer, temporary
    memory inside an operation and overhead of the allocator are not included.

    Args:
        model: Any model, also one from :func:`meta_model`.
        batch_size: Rows.
        length: Positions of a row.
        recompute: Whether activation checkpointing is on.
        loss_chunk: Positions whose logits exist at a time, at least one of each row; ``None`` means
            all.
        precision: Of matrix products, by autocast.

    Returns:
        Bytes of the weights, gradients, activations and logits.

    Raises:
        InputError: If a layer fails with tensors without data, as one that needs their values.

    Example:
        >>> model = meta_model(ModelConfig("attention", vocab_size=10, d_model=8))
        >>> training_bytes(model, 4, 16)["gradients"]
        3744
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    lower = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with _Shapes(allow_non_fake_inputs=True), torch.device("cpu"), lower:
        links = type(model)(model.config).stack.links  # type: ignore[arg-type]  # of that kind
        x = torch.zeros(batch_size, length, model.d_model, requires_grad=True)
        try:
            kept = [_kept_bytes(link, x) for link in links]
        except RuntimeError as error:
            raise InputError(
                "memory is estimated with tensors that have no values, and a layer fails with "
                f"them, as .item() and .numpy() do: {str(error).partition(chr(10))[0]}"
            ) from error
    inputs = len(kept) * x.nbytes
    of_row = min(length, max(1, loss_chunk // batch_size)) if loss_chunk else length
    logits = 4 * batch_size * of_row * model.config.n_outputs
    return {
        "weights": weights,
        "gradients": weights,
        "activations": inputs + max(kept) if recompute else sum(kept),
        "logits": 2 * logits,
    }


class _Shapes(FakeTensorMode):
    """Tensors have no data; calls go to the kernels that tensors with data would go to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.mkldnn_rnn_layer.default:  # PyTorch's shapes lack the workspace
            y, h, c, _ = found
            return y, h, c, y.new_empty(int(WORKSPACE * y.numel()))
        return found


def _kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps from one layer's forward pass, without its parameters."""
    own = {id(p) for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in own:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # the address of a freed storage could be reused
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(kept.values())


def match_width(
    config: ModelConfig, wanted: float, measure: Callable[[ModelConfig], float] = count_parameters
) -> ModelConfig:
    """Choose the width whose size is nearest to the wanted one.

    Widths that a layer refuses (heads must divide them) are skipped.

    Args:
        config: The model; its ``d_model`` is ignored.
        wanted: Wanted size.
        measure: Size of a model, by default its number of parameters; it must not fall as the
            width grows.

    Returns:
        The configuration with the chosen ``d_model``.

    Raises:
        InputError: If the wanted size is not positive or no width up to ``WIDEST`` reaches it, or
            if the model cannot be built at any width.
    """
    check_kind("config", config, ModelConfig, "ModelConfig('h3', vocab_size=256)")
    if not wanted > 0:
        raise InputError(f"the wanted size must be positive, got {wanted}")
    sizes: dict[int, float] = {}

    def too_small(width: int) -> bool:
        try:
            sizes[width] = measure(dataclasses.replace(config, d_model=width))
        except InputError:
            return False
        return sizes[width] < wanted

    def scan(start: int) -> None:
        too_large = 0
        for width in range(start, start + _NEAR * WIDTH_STEP, WIDTH_STEP):
            too_large += not too_small(width) and sizes.get(width, 0) > wanted
            if too_large == 8:  # more than one, in case a size falls as the width grows
                return

    scan(WIDTH_STEP)
    if not sizes:
        measure(dataclasses.replace(config, d_model=_NEAR * WIDTH_STEP))  # raises the reason
    if max(sizes.values()) < wanted and len(set(sizes.values())) > 1:  # else no width helps
        width = _last_too_small(too_small, max(sizes), min(sizes))
        if width > WIDEST:
            raise InputError(
                f"the wanted size must be at most {sizes[width]:,.0f}, which the model has at "
                f"d_model={width}, got {wanted:,.0f}: choose a smaller size"
            )
        scan(width - _NEAR // 2 * WIDTH_STEP)
    nearest = min(sizes, key=lambda width: (abs(sizes[width] - wanted), width))
    return dataclasses.replace(config, d_model=nearest)


def _last_too_small(too_small: Callable[[int], bool], width: int, step: int) -> int:
    """The largest width that is too small, or one above ``WIDEST``.

    The width grows by multiples of ``step``, which suit the heads if ``width`` and ``step`` do:
    the steps double while the width stays too small, and then halve.
    """
    jump = step
    while width <= WIDEST and too_small(width + jump):
        width, jump = width + jump, 2 * jump
    while jump > step and width <= WIDEST:
        jump //= 2
        width += jump if too_small(width + jump) else 0
    return width
