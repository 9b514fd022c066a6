"""Settings of layers are values: checked once, where they are made, at one door."""

from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import stateline.settings
from stateline.errors import InputError
from stateline.layers import (
    ATTENTION_WRAPPERS,
    H3,
    LAYERS,
    WRAPPERS,
    AnyLayer,
    Attention,
    DiagonalSSM,
    SequenceLayer,
    Stack,
)
from stateline.layers.mixers.attention import AttentionSettings
from stateline.models.config import ModelConfig
from stateline.models.factory import make_model, meta_model
from stateline.settings import Count, Positive, describe

WIDTH = 16
NAMES = [*LAYERS, *WRAPPERS]
pytestmark = pytest.mark.usefixtures("unannotated")


def built(name: str, **keywords: Any) -> AnyLayer:
    """A layer, or a wrapper around another one, by its constructor."""
    if name in LAYERS:
        return LAYERS[name](WIDTH, **keywords)
    inner = Attention(WIDTH) if name in ATTENTION_WRAPPERS else H3(WIDTH)
    return WRAPPERS[name](Stack(inner), **keywords)


def config(name: str, *, repeat: int = 1, **keywords: Any) -> ModelConfig:
    """A model of the layer, by a pattern."""
    core = "attention" if name in ATTENTION_WRAPPERS else "h3"
    given = [core] * (name in WRAPPERS) + [f"{key}={value}" for key, value in keywords.items()]
    pattern = f"{name}({', '.join(given)})*{repeat}"
    return ModelConfig(pattern, vocab_size=2, d_model=WIDTH, feed_forward="none")


DOORS: list[Callable[..., object]] = [
    built,
    lambda name, **keywords: make_model(config(name, **keywords)),
]


@pytest.mark.parametrize("door", DOORS, ids=["constructor", "pattern"])
@pytest.mark.parametrize("name", NAMES)
def test_a_misspelt_keyword_is_refused_with_its_neighbour(name: str, door: Any) -> None:
    kind = {**LAYERS, **WRAPPERS}[name]
    for keyword in vars(kind.Settings()):
        with pytest.raises(InputError) as caught:
            door(name, **{f"{keyword}x": 1})
        wanted = f"unknown keyword of {kind.__name__} '{keyword}x': did you mean '{keyword}'? "
        assert str(caught.value).startswith(wanted)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("door", DOORS, ids=["constructor", "pattern"])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_the_wrong_type_is_refused_in_one_line(name: str, door: Any) -> None:
    kind = {**LAYERS, **WRAPPERS}[name]
    for keyword, value in vars(kind.Settings()).items():
        if value == "":  # any text has the right type
            continue
        with pytest.raises(InputError) as caught:
            door(name, **{keyword: "foo"})
        assert str(caught.value).startswith(f"{kind.__name__} wants {keyword} to be ")
        assert "\n" not in str(caught.value)


BELOW = {"above 0": 0, "of at least 1": 0, "of at least 0": -1, "from 0 to below 1": -1}
"""Numbers below ranges."""

RANGED = [
    (name, keyword, describe(hint), number)
    for name in NAMES
    for keyword, hint in get_type_hints(
        {**LAYERS, **WRAPPERS}[name].Settings, include_extras=True
    ).items()
    for words, number in BELOW.items()
    if words in describe(hint)
]


def test_numbers_below_the_ranges_of_annotations_are_refused() -> None:
    assert len(RANGED) >= 120
    for name, keyword, wanted, number in RANGED:
        kind = {**LAYERS, **WRAPPERS}[name]
        with pytest.raises(InputError) as caught:
            kind.Settings(**{keyword: number})
        assert str(caught.value) == (
            f"{kind.__name__} wants {keyword} to be {wanted}, got {number}"
        )


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each keyword has been checked, by name of the layer and of the keyword."""
    counted, check = Counter[str](), stateline.settings.check_type

    def count(owner: str, name: str, value: object, hint: Any) -> None:
        counted[f"{owner}.{name}"] += 1
        check(owner, name, value, hint)

    monkeypatch.setattr(stateline.settings, "check_type", count)
    return counted


class Whole(int):
    """A number that is equal to a default, but another object, so that it is checked."""


class Real(float):
    """The same for other numbers."""


def another(value: Any) -> Any:
    """An equal value of the same kind; booleans, ``None`` and no text have none.

    Choices are spelled.
    """
    kinds = {int: Whole, float: Real, str: lambda text: "".join(list(text))}
    return kinds.get(type(value), str)(value)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_has_at_most_a_dozen_keywords(name: str) -> None:
    assert len(fields({**LAYERS, **WRAPPERS}[name].Settings)) <= 12


@pytest.mark.parametrize("name", NAMES)
def test_a_keyword_is_checked_once(name: str, checks: Counter[str]) -> None:
    """Also where the pattern names three layers that are built to be counted and to be trained."""
    kind = {**LAYERS, **WRAPPERS}[name]
    defaults = vars(kind.Settings()).items()
    given = {k: another(v) for k, v in defaults if v not in (None, "") and type(v) is not bool}
    described = replace(config(name, repeat=3), layers={name: given})
    checks.clear()
    for build in (meta_model, make_model, make_model):
        build(described)
    assert {key: checks[f"{kind.__name__}.{key}"] for key in given} == dict.fromkeys(given, 1)


def test_settings_are_a_value_that_another_layer_can_take(checks: Counter[str]) -> None:
    layer = H3(WIDTH, d_head=4, d_state=np.int64(8))
    assert (layer.settings.d_head, layer.diagonal.settings) == (4, layer.settings)
    assert type(layer.settings.d_state) is int
    with pytest.raises(FrozenInstanceError):
        layer.settings.d_head = 2
    assert DiagonalSSM.with_settings(layer.settings, 2).c.shape[1] == 4
    assert checks == {"H3.d_head": 1, "H3.d_state": 1}


class Own(SequenceLayer[Any]):
    """A layer outside the package, whose constructor declares its settings."""

    def __init__(self, d_model: int, *, rate: Positive = 1.0, most: Count | None = None) -> None:
        super().__init__(d_model)

    init_state = forward_chunk = lambda *_: None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class NarrowSettings(AttentionSettings):
    n_heads: Count = 2


class Narrow(Attention):
    """A layer outside the package, with the settings of another one and its own default."""

    settings: NarrowSettings


def test_layers_of_other_code_use_the_same_door() -> None:
    assert Own(WIDTH, rate=2).settings == Own.Settings(rate=2)
    with pytest.raises(InputError, match="Own wants rate to be a finite number above 0, got -1"):
        Own(WIDTH, rate=-1)
    with pytest.raises(InputError, match="Own wants most to be int of at least 1 or none, got 0"):
        Own(WIDTH, most=0)
    assert (Narrow(WIDTH).n_heads, Narrow(WIDTH, n_heads=4).n_heads) == (2, 4)
    with pytest.raises(InputError, match="Narrow wants soft_cap to be a finite number above"):
        Narrow(WIDTH, soft_cap=-1)


@pytest.mark.parametrize("width", [0, -1, 2.5, "wide", None])
def test_a_width_that_no_tensor_has_is_refused(width: Any) -> None:
    with pytest.raises(InputError, match="H3 wants d_model to be int of at least 1, got "):
        H3(width)
    with pytest.raises(InputError, match="H3 wants d_model to be int of at least 1, got "):
        H3(d_model=width)


def test_weights_do_not_depend_on_the_door() -> None:
    torch.manual_seed(0)
    one = H3(d_model=WIDTH, d_head=4)
    torch.manual_seed(0)
    other = H3.with_settings(H3.Settings(d_head=4), WIDTH)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
