"""Building the layers of a pattern."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

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
from stateline.pattern import Item, parse_pattern
from stateline.settings import Choice, Settings

MAX_LAYERS = 512
"""Upper limit on the number of layers that a pattern may name, repeats counted."""

MAX_RUNS = 4096
"""Upper limit on how many layers a token passes through, the passes of wrappers counted."""

_LOOPS = ("passes", "n_layers")
"""Keywords that multiply the number of layers that a token passes through."""


class Planned(NamedTuple):
    """One item of a pattern, decided: what is built, and with which settings.

    Attributes:
        name: Name of the layer, empty for a group.
        made: The layer's class; ``None`` for a group.
        settings: Its settings.
        parts: What a wrapper is applied to, or what a group consists of.
        repeat: How often the item is repeated.
    """

    name: str
    made: type[AnyLayer] | None
    settings: Any
    parts: tuple[tuple["Planned", ...], ...]
    repeat: int


class Plan(NamedTuple):
    """The layers of a model, decided: its settings are checked, but nothing is built.

    Attributes:
        items: The items of the pattern.
        feed_forward: The feed-forward of the blocks, if they have one.
    """

    items: tuple[Planned, ...]
    feed_forward: Planned | None


def build_stack(config: ModelConfig) -> Stack:
    """Build all layers of a model: a stack of residual blocks, and of wrappers around such stacks.

    A block computes ``x + layer(norm(x))``, then ``x + feed_forward(norm(x))`` if the layer wants a
    feed-forward; a parallel block adds both branches to the same input.

    Raises:
        InputError: If the pattern is malformed or asks for too much, or if it names an unknown
            layer or keyword or a value that cannot be used.
    """
    plan = _plan_of(config)
    stack = Stack(*_layers(plan.items, plan.feed_forward, config))
    if config.norm == "batch" and stack.causal:
        raise InputError(
            "norm='batch' shows later positions to earlier ones in training: take norm='layer', or "
            "bidirectional layers"
        )
    return stack


def _plan_of(config: ModelConfig) -> Plan:
    """The plan of a configuration, made once as long as its names mean the same classes."""
    plan: Plan | None = config.kept.get("plan")
    if plan is None or not all(_is_current(item) for item in plan.items):
        plan = config.kept["plan"] = _plan(config)
    return plan


def _is_current(item: Planned) -> bool:
    known = item.made is None or _class(item.name) is item.made
    return known and all(_is_current(inner) for part in item.parts for inner in part)


def _plan(config: ModelConfig) -> Plan:
    for kind in (*config.layers, *config.norm_after.split()):
        _class(kind)
    items = tuple(_planned(item, config) for item in parse_pattern(config.pattern))
    _check_limits(items)
    if config.feed_forward == "none":
        return Plan(items, None)
    name, _ = feed_forward_of(config)
    return Plan(items, _planned(Item(name, {}), config))


def _class(name: str) -> type[AnyLayer]:
    if name not in LAYERS and name not in WRAPPERS:
        raise unknown_name("layer", name, [*LAYERS, *WRAPPERS], extensible=True)
    return (LAYERS if name in LAYERS else WRAPPERS)[name]


def _planned(item: Item, config: ModelConfig) -> Planned:
    given = (item.core, *item.others) if item.core else ()
    parts = tuple(tuple(_planned(inner, config) for inner in part) for part in given)
    if not item.name:
        return Planned("", None, None, parts, item.repeat)
    made = _class(item.name)
    if item.name in WRAPPERS and not parts:
        raise InputError(f"{item.name} wraps other layers: give a pattern, as in {item.name}(h3*2)")
    if item.name in LAYERS and parts:
        raise InputError(
            f"{item.name} takes keyword=value only; only {', '.join(WRAPPERS)} take a pattern"
        )
    if len(parts) > 1 and not made.takes_several:
        raise InputError(
            f"{item.name} takes one pattern, got {len(parts)}: put spaces between layers that "
            "follow each other"
        )
    settings = made.Settings(**{**_shared(item.name, config), **item.keywords})
    _check_sizes(item.name, settings)
    return Planned(item.name, made, settings, parts, item.repeat)


def _shared(name: str, config: ModelConfig) -> dict[str, Any]:
    """Keywords of all layers of a kind; feed-forwards that a pattern names are as inside blocks."""
    kind, keywords = feed_forward_of(config)
    blocks = keywords if kind == name and config.feed_forward != "none" else {}
    return {**blocks, **config.layers.get(name, {})}


def _check_sizes(owner: str, settings: Settings) -> None:
    """Refuse numbers that are too large for any size of a layer."""
    for name, value in vars(settings).items():
        if isinstance(value, Choice):
            _check_sizes(value.owner, value)
        elif isinstance(value, int) and value > MAX_SIZE:
            raise InputError(f"{owner} wants {name} to be at most {MAX_SIZE:,}, got more")


def _check_limits(items: Sequence[Planned]) -> None:
    """Raise InputError if the pattern asks for too many layers, before any is built."""
    for what, most, number in (
        ("name", MAX_LAYERS, _count(items, runs=False)),
        ("run", MAX_RUNS, _count(items, runs=True)),
    ):
        if number > most:
            raise InputError(
                f"a pattern may {what} at most {most:,} layers, got "
                f"{number if number < 10**12 else 'more than 10^12'}: lower the repeat counts"
                + (" or passes" if what == "run" else "")
            )


def _count(items: Sequence[Planned], *, runs: bool) -> int:
    """How many layers items name, or how many a token passes through."""
    total = 0
    for item in items:
        inner = sum(_count(part, runs=runs) for part in item.parts) if item.parts else 1
        loops = [getattr(item.settings, name, 1) for name in _LOOPS] if runs else ()
        total += item.repeat * inner * max(1, prod(loops))
    return total


def _layers(
    items: Sequence[Planned], feed_forward: Planned | None, config: ModelConfig
) -> list[AnyLayer]:
    return [
        layer
        for item in items
        for _ in range(item.repeat)
        for layer in _built(item, feed_forward, config)
    ]


def _built(item: Planned, feed_forward: Planned | None, config: ModelConfig) -> list[AnyLayer]:
    """Build the layers of one item, without its repeats."""
    if item.made is None:
        return [y for part in item.parts for y in _layers(part, feed_forward, config)]
    first: AnyLayer | int = config.d_model
    if item.parts:
        bare = replace(config, block="plain") if item.made.is_mixer else config
        inside = None if item.made.is_mixer else feed_forward
        parts = [Stack(*_layers(part, inside, bare)) for part in item.parts]
        # With several arguments, an argument of one layer is this layer, not a stack.
        bare_parts = (p.links[0] if len(p.links) == 1 else p for p in parts)
        first = Stack(*bare_parts) if item.made.takes_several else parts[0]
    layer = item.made.with_settings(item.settings, first)
    if item.parts and not item.made.is_mixer:
        return [layer]
    if not layer.wants_feed_forward or feed_forward is None:
        return _block([layer], config, item.name)
    assert feed_forward.made is not None
    after = feed_forward.made.with_settings(feed_forward.settings, config.d_model)
    return _block([layer, after], config, item.name)


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
