"""Building the layers of a pattern."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from stateline.errors import InputError, unknown_name
from stateline.layers import (
    LAYERS,
    NORMS,
    WRAPPERS,
    AnyLayer,
    Branch,
    NormAfter,
    NormedResidual,
    ParallelResidual,
    PostNorm,
    Residual,
    Sandwich,
    Stack,
)
from stateline.models.config import MAX_SIZE, ModelConfig, feed_forward_of
from stateline.models.pattern import Item, Value, parse_pattern
from stateline.settings import construct

MAX_LAYERS = 512
"""Upper limit on the number of layers that a pattern may name, repeats counted."""

MAX_RUNS = 4096
"""Upper limit on how many layers a token passes through, the passes of wrappers counted."""

_LOOPS = ("passes", "n_layers")
"""Keywords that multiply the number of layers that a token passes through."""


def build_stack(config: ModelConfig) -> Stack:
    """Build all layers of a model: a stack of residual blocks, and of wrappers around such stacks.

    A block computes ``x + layer(norm(x))``, then ``x + feed_forward(norm(x))`` if the layer wants a
    feed-forward; a parallel block adds both branches to the same input.

    Raises:
        InputError: If the pattern is malformed or asks for too much, or if it names an unknown
            layer or keyword or a value that cannot be used.
    """
    for kind in (*config.layers, *config.norm_after.split()):
        if kind not in LAYERS and kind not in WRAPPERS:
            raise unknown_name("layer", kind, [*LAYERS, *WRAPPERS], extensible=True)
    items = parse_pattern(config.pattern)
    _check_limits(items, config)
    return Stack(*_layers(items, config))


def _check_limits(items: Sequence[Item], config: ModelConfig) -> None:
    """Raise InputError if the pattern asks for too many layers, before any is built."""
    for what, most, number in (
        ("name", MAX_LAYERS, _count(items, config, runs=False)),
        ("run", MAX_RUNS, _count(items, config, runs=True)),
    ):
        if number > most:
            raise InputError(
                f"a pattern may {what} at most {most:,} layers, got "
                f"{number if number < 10**12 else 'more than 10^12'}: lower the repeat counts"
                + (" or passes" if what == "run" else "")
            )


def _count(items: Sequence[Item], config: ModelConfig, *, runs: bool) -> int:
    total = 0
    for item in items:
        parts = [_count(part, config, runs=runs) for part in (item.core, *item.others) if part]
        inner = sum(parts) if parts else 1
        total += item.repeat * inner * (_loops(item, config) if runs else 1)
    return total


def _loops(item: Item, config: ModelConfig) -> int:
    """How often the layers of an item are run for each token."""
    made = WRAPPERS.get(item.name) or LAYERS.get(item.name)
    if made is None:
        return 1
    parameters = inspect.signature(made).parameters
    given = _keywords(item, config)
    numbers = (given.get(n, parameters[n].default) for n in _LOOPS if n in parameters)
    return prod(n for n in numbers if isinstance(n, int) and n > 0)


def _keywords(item: Item, config: ModelConfig) -> Mapping[str, Value]:
    keywords = {**config.layers.get(item.name, {}), **item.keywords}
    for name, value in keywords.items():
        if isinstance(value, int) and value > MAX_SIZE:
            raise InputError(f"{item.name} wants {name} to be at most {MAX_SIZE:,}, got more")
    return keywords


def _layers(items: Sequence[Item], config: ModelConfig) -> list[AnyLayer]:
    return [part for item in items for _ in range(item.repeat) for part in _part(item, config)]


def _part(item: Item, config: ModelConfig) -> list[AnyLayer]:
    """Build the layers of one item of a pattern, without its repeats."""
    if not item.name:
        return _layers(item.core, config)
    keywords = _keywords(item, config)
    if item.name in WRAPPERS:
        if not item.core:
            raise InputError(
                f"{item.name} wraps other layers: give a pattern, as in {item.name}(h3*2)"
            )
        made = WRAPPERS[item.name]
        if item.others and not made.takes_several:
            raise InputError(
                f"{item.name} takes one pattern, got {1 + len(item.others)}: put spaces between "
                "layers that follow each other"
            )
        bare = replace(config, block="plain", feed_forward="none") if made.is_mixer else config
        parts = [Stack(*_layers(part, bare)) for part in (item.core, *item.others)]
        # With several arguments, an argument of one layer is this layer, not a stack.
        bare_parts = (p.links[0] if len(p.links) == 1 else p for p in parts)
        core = Stack(*bare_parts) if made.takes_several else parts[0]
        layer = construct("wrapper", item.name, made, keywords, core)
        return _with_feed_forward(layer, config, item.name) if made.is_mixer else [layer]
    if item.name not in LAYERS:
        raise unknown_name("layer", item.name, [*LAYERS, *WRAPPERS], extensible=True)
    if item.core:
        raise InputError(
            f"{item.name} takes keyword=value only; only {', '.join(WRAPPERS)} take a pattern"
        )
    layer = construct("layer", item.name, LAYERS[item.name], keywords, config.d_model)
    return _with_feed_forward(layer, config, item.name)


def _with_feed_forward(layer: AnyLayer, config: ModelConfig, kind: str) -> list[AnyLayer]:
    """The layers of one block: a mixer, and its feed-forward if it has one."""
    if not layer.wants_feed_forward or config.feed_forward == "none":
        return _block([layer], config, kind)
    name, keywords = feed_forward_of(config)
    keywords = {**keywords, **config.layers.get(name, {})}
    feed_forward = construct("layer", name, LAYERS[name], keywords, config.d_model)
    return _block([layer, feed_forward], config, kind)


def _block(layers: list[AnyLayer], config: ModelConfig, kind: str) -> list[AnyLayer]:
    """Put the layers of a block on residual branches, as the configuration says."""
    if config.block == "plain":
        return layers
    norm = partial(NORMS[config.norm], config.d_model, config.norm_eps)
    join = (config.residual_multiplier, config.residual_dropout, config.stream_multiplier)
    if config.block == "parallel" and len(layers) > 1:
        return [ParallelResidual(*(Residual(layer, norm(), *join) for layer in layers))]
    if config.block == "sandwich":
        return [Sandwich(layer, norm(), norm(), *join) for layer in layers]
    branch = NormAfter if kind in config.norm_after.split() else _BRANCHES[config.block]
    return [branch(layer, norm(), *join) for layer in layers]


_BRANCHES: Mapping[str, type[Branch]] = {
    "sequential": Residual,
    "parallel": Residual,
    "post_norm": PostNorm,
    "normed": NormedResidual,
}
