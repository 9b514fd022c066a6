"""Devices and dtypes by name."""

import re

import pytest
import torch

from stateline.cli import Parser
from stateline.cli.options import add_device_and_dtype
from stateline.devices import log_bfloat16_rate, resolve_device, resolve_dtype
from stateline.errors import InputError


@pytest.mark.parametrize("cuda", [0, 2])
def test_auto_is_a_cuda_device_if_there_is_one(monkeypatch: pytest.MonkeyPatch, cuda: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    assert resolve_device().type == ("cuda" if cuda else "cpu")


@pytest.mark.parametrize("name", ["cpu", "meta", "cuda", "cuda:1"])
def test_a_device_that_is_there_is_given(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(name) == torch.device(name)


@pytest.mark.parametrize("name", ["cuda:2", "cuda:99", "mps"])
def test_a_device_that_is_missing_is_refused_with_those_there(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match=f"device {name} .* this machine has cpu, cuda:0, cuda:1$"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cpu:0:0", "CPU", "cuda\n"])
def test_a_malformed_device_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError, match=r"^device must be auto, cpu, .* machine has cpu") as e:
        resolve_device(name)
    assert "\n" not in str(e.value)


def test_dtypes_have_their_names_in_pytorch() -> None:
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert resolve_dtype(name) == getattr(torch, name)
    with pytest.raises(InputError, match=r"dtype must be one of float32, .*, got 'int8'"):
        resolve_dtype("int8")


def test_the_options_parse() -> None:
    parser = Parser()
    add_device_and_dtype(parser)
    assert parser.parse_args([]).as_dict() == {"device": "auto", "dtype": None}
    given = parser.parse_args(["--device", "cuda:1", "--dtype", "bfloat16"])
    assert given.as_dict() == {"device": "cuda:1", "dtype": "bfloat16"}
    with pytest.raises(InputError, match=r"dtype must be one of float32, bfloat16, .*, got 'int8'"):
        parser.parse_args(["--dtype", "int8"])


def test_the_rate_of_bfloat16_is_measured_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log_bfloat16_rate.cache_clear()
    with caplog.at_level("INFO", logger="stateline"):
        log_bfloat16_rate()
        log_bfloat16_rate()
    (message,) = caplog.messages
    rate = re.fullmatch(
        r"this processor multiplies in bfloat16 at (\S+) times the rate of float32", message
    )
    assert rate is not None
    assert float(rate[1]) > 0
