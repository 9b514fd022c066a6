"""From a pattern to layers."""

from collections.abc import Sequence
from functools import partial

from stateline.errors import InputError, unknown_name
from stateline.layers import (
    LAYERS,
    NORMS,
    WRAPPERS,
    AnyLayer,
    Parallel,
    PostNorm,
    Residual,
    Stack,
)
from stateline.models.config import ModelConfig
from stateline.models.pattern import Item, construct, parse_pattern


def build_stack(config: ModelConfig) -> Stack:
    """All layers of a model: a stack of residual blocks and of wrappers around such stacks.

    A block is ``x + layer(norm(x))``, then ``x + feed_forward(norm(x))`` if the layer wants one;
    a parallel block adds both branches to the same input.

    Args:
        config: Its pattern, width, normalisation, feed-forward and keywords by kind are used.

    Returns:
        The stack.

    Raises:
        InputError: If the pattern is malformed, names what is unknown, or sets what cannot be.
    """
    for kind in config.layers:
        if kind not in LAYERS and kind not in WRAPPERS:
            raise unknown_name("layer", kind, [*LAYERS, *WRAPPERS])
    return _stack(parse_pattern(config.pattern), config)


def _stack(items: Sequence[Item], config: ModelConfig) -> Stack:
    return Stack(
        *(part for item in items for _ in range(item.repeat) for part in _part(item, config))
    )


def _part(item: Item, config: ModelConfig) -> list[AnyLayer]:
    """What one name of the pattern stands for."""
    keywords = {**config.layers.get(item.name, {}), **item.keywords}
    if item.name in WRAPPERS:
        if not item.core:
            raise InputError(
                f"{item.name} wraps other layers: give a pattern, as in {item.name}(h3*2)"
            )
        core = _stack(item.core, config)
        return [construct("wrapper", item.name, WRAPPERS[item.name], keywords, core)]
    if item.name not in LAYERS:
        raise unknown_name("layer", item.name, [*LAYERS, *WRAPPERS])
    if item.core:
        raise InputError(
            f"{item.name} takes keyword=value only; a pattern stands inside {', '.join(WRAPPERS)}"
        )
    layer = construct("layer", item.name, LAYERS[item.name], keywords, config.d_model)
    if not layer.wants_feed_forward or config.feed_forward == "none":
        return _block([layer], config)
    name = "feed_forward"
    keywords = {"activation": config.feed_forward, **config.layers.get(name, {})}
    feed_forward = construct("layer", name, LAYERS[name], keywords, config.d_model)
    return _block([layer, feed_forward], config)


def _block(layers: list[AnyLayer], config: ModelConfig) -> list[AnyLayer]:
    """The layers, joined as the configuration says."""
    if config.block == "plain":
        return layers
    norm = partial(NORMS[config.norm], config.d_model, config.norm_eps)
    if config.block == "post_norm":
        return [PostNorm(layer, norm()) for layer in layers]
    branches = [Residual(layer, norm()) for layer in layers]
    alone = len(branches) == 1 or config.block == "sequential"
    return [*branches] if alone else [Parallel(*branches)]
