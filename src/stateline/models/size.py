"""How large a model is, before it is built."""

import dataclasses

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.make import AnyModel, make_model

WIDTH_STEP = 4
"""Widths that are tried are multiples of this."""


def meta_model(config: ModelConfig) -> AnyModel:
    """The model without memory for its weights: enough to count and to measure."""
    with torch.device("meta"):
        return make_model(config)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; tied ones count once.

    Example:
        >>> config = ModelConfig("attention", vocab_size=10, d_model=8, feed_forward="none")
        >>> count_parameters(config)
        368
    """
    return sum(p.numel() for p in meta_model(config).parameters())


def training_bytes(
    model: AnyModel, batch_size: int, length: int, *, recompute: bool = False
) -> dict[str, int]:
    """Memory that an update in float32 with AdamW needs, as far as it can be foretold.

    What autograd keeps is counted by running the model on tensors without data; temporary memory
    inside an operation, and the allocator's own, come on top.

    Args:
        model: From :func:`meta_model`.
        batch_size: Rows of a batch.
        length: Tokens in a row.
        recompute: Whether activations are computed again in the backward pass.

    Returns:
        Bytes of weights, gradients, optimizer, activations and logits.

    Example:
        >>> model = meta_model(ModelConfig("attention", vocab_size=10, d_model=8))
        >>> training_bytes(model, 4, 16)["gradients"]
        3744
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    x = torch.zeros(batch_size, length, model.d_model, device="meta", requires_grad=True)
    kept = [_kept_bytes(link, x) for link in model.stack.links]
    entrances = len(kept) * x.numel() * x.element_size()
    logits = 4 * batch_size * length * model.config.n_outputs
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights,
        "activations": entrances + max(kept) if recompute else sum(kept),
        "logits": 2 * logits,  # and their gradient
    }


def _kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps of one layer's forward pass, beside its parameters."""
    own = {id(p) for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in own:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # a storage that was freed would lend its number to the next
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(kept.values())


def match_width(config: ModelConfig, parameters: int) -> ModelConfig:
    """The same model at the width whose number of parameters is nearest to the wanted one.

    Widths that do not suit a layer (heads must divide them) are passed over.

    Args:
        config: The model; its own ``d_model`` is ignored.
        parameters: Wanted number of parameters.

    Returns:
        The configuration with ``d_model`` set.

    Raises:
        InputError: If the model cannot be built at any width.
    """
    best, best_distance, failure = config, float("inf"), None
    width, too_large = 0, 0
    while too_large < 8:  # a few more, since the next larger ones may not suit
        width += WIDTH_STEP
        candidate = dataclasses.replace(config, d_model=width)
        try:
            distance = count_parameters(candidate) - parameters
        except InputError as error:
            failure = error
            if width > 64 * WIDTH_STEP and best_distance == float("inf"):
                raise failure from None
            continue
        too_large += distance > 0
        if abs(distance) < best_distance:
            best, best_distance = candidate, abs(distance)
    return best
