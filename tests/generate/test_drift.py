"""How far a rounded state drifts: the numbers, and what is refused."""

import pytest
import torch

from stateline.cli import main
from stateline.errors import InputError
from stateline.generate import drift
from stateline.layers.stored_state import storable_parts, stored
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

pytestmark = pytest.mark.cpu


def model_of(pattern: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, vocab_size=16, d_model=8)).eval()


@pytest.mark.parametrize("pattern", ["h3 attention", "gated_delta_net"])
def test_a_rounded_state_is_the_one_that_decoding_stores(pattern: str) -> None:
    model, length = model_of(pattern), 20
    *_, found = drift(model, ["bfloat16"], length=length, seed=3)
    tokens = torch.randint(16, (16,), generator=(random := torch.Generator().manual_seed(3)))
    tokens = torch.cat([tokens, torch.randint(16, (length - 16,), generator=random)])
    exact, rounded = (model.init_state(1, capacity=length) for _ in range(2))
    rounded, change = stored(rounded, torch.bfloat16), 0.0
    with torch.no_grad():
        for place, token in enumerate(tokens):
            pair = [model.step_(token[None], state).softmax(-1) for state in (exact, rounded)]
            change += float((pair[0] - pair[1]).abs().sum()) / 2 if place >= 16 else 0.0
    a, b = (
        torch.cat([leaf.flatten().double() for leaf in storable_parts(state)])
        for state in (exact, rounded)
    )
    assert found.length == length
    assert found.state["bfloat16"] == pytest.approx(float((a - b).norm() / a.norm()), rel=0.02)
    assert found.answers["bfloat16"] == pytest.approx(change / (length - 16), rel=0.05)


def test_a_state_that_never_forgets_drifts_more_than_one_that_forgets() -> None:
    """A sum of 1,024 terms in bfloat16 stands still once a term is below a 256th of it."""
    ends = [list(drift(model_of(p), length=1024))[-1] for p in ("linear_attention", "mamba")]
    assert ends[0].state["bfloat16"] > 0.2
    assert ends[1].state["bfloat16"] < 0.01


def test_lengths_are_told_by_factors_of_four() -> None:
    found = list(drift(model_of("lstm"), ["float16", "int8"], length=70))
    assert [one.length for one in found] == [16, 64, 70]
    assert all(one.state["float16"] < one.state["int8"] for one in found)


@pytest.mark.parametrize(
    ("pattern", "roundings", "length", "message"),
    [
        ("lstm", ["int4"], 9, "got 'int4'"),
        ("lstm", ["int8"], 0, "at least 1, got 0"),
        ("attention", ["int8"], 9, "nothing in the state of this model is rounded"),
    ],
)
def test_a_drift_that_cannot_be_measured_is_refused(
    pattern: str, roundings: list[str], length: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        next(drift(model_of(pattern), roundings, length=length))


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--d_model", "8", "--state_dtype", "bfloat16", "int8", "--length", "64"
    assert main(["check", "h3", *given]) == 0
    *_, titles, first, last = capsys.readouterr().out.splitlines()
    assert titles.split() == ["tokens", "bfloat16", "int8"]
    assert [line.split()[0] for line in (first, last)] == ["16", "64"]
    assert main(["check", "--state_dtype", "int8"]) == 2
