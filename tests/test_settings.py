import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

import stateline.settings
from stateline.errors import InputError
from stateline.generate import Sampling
from stateline.models.config import ModelConfig
from stateline.settings import Checked, at_least, check_settings
from stateline.tasks import Copying
from stateline.train.config import TrainConfig


class Thing(metaclass=Checked):
    def __init__(
        self,
        width: int,
        *,
        size: int = 1,
        rate: float = 0.5,
        kind: Literal["soft", "hard"] = "soft",
        flag: bool = False,
        most: int | None = None,
        anything: Any = None,
        word: Literal["none", "hard"] = "hard",
    ) -> None:
        self.given = {k: v for k, v in locals().items() if k != "self"}


def made(**keywords: Any) -> dict[str, Any]:
    return {k: v for k, v in Thing(8, **keywords).given.items() if k != "word"}


def test_keywords_and_given_arguments_reach_the_builder() -> None:
    wanted = {"width": 8, "size": 2, "rate": 0.1, "kind": "hard", "flag": True, "most": 3}
    assert made(size=2, rate=0.1, kind="hard", flag=True, most=3) == {**wanted, "anything": None}


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("rate", 2), ("most", None), ("anything", 1), ("anything", True), ("anything", "word")],
)
def test_values_that_serve_are_passed_on_as_they_are(keyword: str, value: object) -> None:
    found = made(**{keyword: value})[keyword]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("number", [np.int64(2), np.int32(2), torch.tensor(2)], ids=repr)
def test_numbers_of_numpy_and_pytorch_become_those_of_python(number: Any) -> None:
    config = ModelConfig("lstm", number, d_model=number)
    assert (type(config.vocab_size), type(config.d_model)) == (int, int)
    assert ModelConfig.from_json(config.to_json()) == config == ModelConfig("lstm", 2, d_model=2)
    assert type(made(size=number)["size"]) is int
    layers = {"attention": {"n_heads": number}}
    assert ModelConfig("attention", 2, layers=layers).layers == {"attention": {"n_heads": 2}}
    with pytest.raises(InputError, match="wants d_model to be int from 1 to"):
        ModelConfig("lstm", 2, d_model=np.float32(2.5))  # type: ignore[arg-type]


def test_none_is_a_word_where_one_of_the_names_is() -> None:
    given = Thing(8, word=None, most=None).given
    assert (given["word"], given["most"]) == ("none", None)


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("size", 1.5, "Thing wants size to be int, got 1.5"),
        ("size", True, "Thing wants size to be int, got True"),
        ("size", None, "Thing wants size to be int, got None"),
        ("size", "big", "Thing wants size to be int, got 'big'"),
        ("rate", "fast", "Thing wants rate to be a finite number, got 'fast'"),
        ("rate", False, "Thing wants rate to be a finite number, got False"),
        ("rate", float("nan"), "Thing wants rate to be a finite number, got nan"),
        ("rate", float("inf"), "Thing wants rate to be a finite number, got inf"),
        ("flag", 1, "Thing wants flag to be bool, got 1"),
        ("kind", "stiff", "Thing wants kind to be one of soft, hard, got 'stiff'"),
        ("most", "all", "Thing wants most to be int or none, got 'all'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(keyword: str, value: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        made(**{keyword: value})
    assert str(caught.value) == message


def test_an_unknown_keyword_gets_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match="unknown keyword of Thing 'sise': did you mean 'size'"):
        made(sise=1)


def test_what_was_given_by_position_is_no_keyword() -> None:
    with pytest.raises(InputError, match="unknown keyword of Thing 'width'"):
        made(width=1)


@dataclass
class Sample:
    kind: ClassVar[str] = "sample"
    layers: Mapping[str, Mapping[str, int | str]]
    size: int = 1
    level: Literal[1, 2] = 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": {"h3": {1: 3}}}, "wants layers to be a mapping from str to a mapping"),
        ({"layers": {}, "size": 2**63}, "wants size to fit into 64 bits"),
        ({"layers": {}, "size": 10**5000}, "wants size to fit into 64 bits"),
        ({"layers": {"h3": {"size": 10**5000}}}, "wants layers to be a mapping"),
        ({"layers": {}, "level": True}, "wants level to be one of 1, 2, got True"),
        ({"layers": {}, "level": "a\nb"}, r"got 'a\\nb'"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_wrong_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_settings("the sample", Sample(**settings))
    assert "\n" not in str(caught.value)


def test_right_settings_pass() -> None:
    check_settings("the sample", Sample({"h3": {"size": 2, "mode": "a"}}, 2**63 - 1))


@pytest.mark.parametrize("wrong", ["3", [3], torch.tensor([3, 3]), float("nan"), 0])
@pytest.mark.usefixtures("unannotated")
def test_what_is_no_number_is_not_at_least_one(wrong: Any) -> None:
    with pytest.raises(InputError, match="length must be at least 1, got length="):
        at_least(1, length=wrong)
    at_least(1, length=torch.tensor(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (ModelConfig, {"pattern": "lstm", "vocab_size": 5, "norm_eps": 1e-3}),
        (TrainConfig, {"steps": 7, "lr": 0.25, "schedule": "linear"}),
        (Sampling, {"temperature": 0.5, "top_k": 3}),
        (Copying, {"seed": 3, "max_len": 12, "metric": "character_accuracy"}),
    ],
)
def test_what_is_given_is_checked_once(
    kind: type, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = list[str](), stateline.settings.check_type
    monkeypatch.setattr(
        stateline.settings, "check_type", lambda *a: (checked.append(a[1]), check(*a))
    )
    made = kind(**given)
    assert (checked, {name: getattr(made, name) for name in given}) == ([*given], given)
    first = next(iter(inspect.signature(kind).parameters))
    checked.clear()
    kind(given.get(first, getattr(made, first)), **{n: v for n, v in given.items() if n != first})
    assert checked == list(dict.fromkeys([first, *given]))
    with pytest.raises(InputError, match=r"^unknown keyword of \S.* 'sise': (did|Known)"):
        kind(**given, sise=1)
