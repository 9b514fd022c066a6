"""Settings that make no sense are refused in one line, at every door."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

from stateline.errors import InputError
from stateline.generate import Sampling
from stateline.layers import LAYERS, WRAPPERS, Attention, FeedForward, Stack
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.tasks import TASKS, make_task
from stateline.train.config import TrainConfig

WIDTH = 8
VALUES = [math.nan, math.inf, -1, 0, "foo", True, None]
"""What no setting, or not every setting, can be."""

USED = {
    "attention": {"position": "rope", "qk_norm": True},
    "sliding_attention": {"position": "rope"},
    "mamba": {"norm_eps": 1e-5},
    "mamba3": {"out_norm": True},
    "moe": {"scores": "sigmoid", "correction": True},
    "parallel": {"join": "norm"},
}
"""Settings with which others have an effect."""

pytestmark = pytest.mark.usefixtures("unannotated")


def options(
    make: Callable[..., object], values: Sequence[object] = VALUES
) -> Iterator[tuple[str, Any]]:
    """Every option of a constructor, with every value."""
    for name in list(inspect.signature(make).parameters)[1:]:
        yield from ((name, value) for value in values)


def is_setting(value: object) -> bool:
    """Whether some option can have the value."""
    return value != "foo" and not (isinstance(value, float) and not math.isfinite(value))


@pytest.mark.parametrize("table", [LAYERS, WRAPPERS], ids=["layers", "wrappers"])
def test_layers_refuse_a_setting_or_have_finite_outputs(table: Any) -> None:
    x, core = torch.randn(1, 3, WIDTH), Stack(Attention(WIDTH), FeedForward(WIDTH))
    for kind in table:
        for name, value in options(table[kind]):
            given = {**USED.get(kind, {}), name: value}
            try:
                layer = table[kind](WIDTH if table is LAYERS else core, **given)
            except InputError:
                continue
            assert is_setting(value), (kind, given)
            assert layer(x).isfinite().all(), (kind, given)


def test_layers_refuse_a_width_that_no_tensor_has() -> None:
    widths = [(kind, n) for kind in LAYERS for n, _ in options(LAYERS[kind], [0]) if "expand" in n]
    assert len(widths) >= 10
    for kind, name in widths:
        with pytest.raises(InputError, match=f"wants {name} to be"):
            LAYERS[kind](WIDTH, **{name: 1e300})


def test_patterns_refuse_a_setting_or_build_a_model() -> None:
    """A value of each kind: patterns give all of them to the constructors above."""
    with torch.device("meta"):
        for kind in (*LAYERS, *WRAPPERS):
            first = "attention, " if kind in WRAPPERS else ""
            for name, value in options({**LAYERS, **WRAPPERS}[kind], [math.nan, -1, "foo"]):
                text = f"{kind}({first}{name}={str(value).lower()})"
                try:
                    build_stack(ModelConfig(text, vocab_size=2, d_model=WIDTH))
                except InputError:
                    continue
                assert is_setting(value), text


def test_tasks_refuse_a_setting_or_have_batches() -> None:
    for kind in TASKS:
        for name, value in options(TASKS[kind]):
            text = f"{kind}({name}={str(value).lower()})"
            try:
                task = make_task(text)
            except InputError:
                continue
            task.train_batch(0)
            assert is_setting(value), text


@pytest.mark.parametrize(
    ("kind", "given"),
    [(TrainConfig, {}), (Sampling, {}), (ModelConfig, {"pattern": "lstm", "vocab_size": 2})],
)
def test_configurations_refuse_a_setting_of_another_kind(kind: Any, given: dict[str, Any]) -> None:
    for field in fields(kind):
        for value in VALUES:
            try:
                kind(**{**given, field.name: value})
            except InputError:
                continue
            assert is_setting(value) or field.type in (str, str | None), (field.name, value)
            assert value is not True or field.type is bool, field.name


def test_zeros_of_runs_and_published_models_are_taken_where_they_have_a_meaning() -> None:
    """A norm without an epsilon."""
    assert Attention(WIDTH, qk_norm="rms(eps=0)")
