import math

import pytest
import torch

from stateline.bench import speed
from stateline.bench.speed import decode_tokens_per_second, train_tokens_per_second
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from tests.devices import watch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "TOKENS_PER_BATCH", 64)
    monkeypatch.setattr(speed, "DECODE_STEPS", 4)


def model(pattern: str) -> LanguageModel:
    return LanguageModel(ModelConfig(pattern, vocab_size=10, d_model=8))


@pytest.mark.parametrize("pattern", ["attention h3", "ladder(s4d lstm)"])
def test_speeds_are_positive_numbers(pattern: str) -> None:
    made = model(pattern)
    for found in (train_tokens_per_second(made, 16), decode_tokens_per_second(made, 16)):
        assert 0 < found < math.inf


@pytest.mark.parametrize(("length", "rows"), [(16, 4), (64, 1), (100, 1)])
def test_a_training_batch_has_as_many_rows_as_make_the_tokens(length: int, rows: int) -> None:
    made, shapes = model("h3"), set[torch.Size]()
    made.register_forward_hook(lambda _module, inputs, _output: shapes.add(inputs[0].shape))
    train_tokens_per_second(made, length)
    assert shapes == {torch.Size([rows, length])}


def test_training_speed_is_tokens_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_median_seconds", lambda *_: 0.5)
    assert train_tokens_per_second(model("h3"), 16) == 64 / 0.5


def test_decoding_speed_is_steps_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_median_seconds", lambda *_: 0.5)
    assert decode_tokens_per_second(model("h3"), 16) == 4 / 0.5


def test_every_round_of_decoding_starts_after_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made, positions = model("attention h3"), list[int]()
    step = made.step_

    def watched(token: torch.Tensor, state: object) -> torch.Tensor:
        positions.append(int(state.position))
        return step(token, state)

    monkeypatch.setattr(made, "step_", watched)
    decode_tokens_per_second(made, 16)
    assert positions == [16, 17, 18, 19] * 4  # one round that is not counted, three that are


def test_the_first_call_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 3.0, 3.0, 8.0])  # begin and end of three calls: 1, 2, 5 seconds
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(times))
    calls: list[None] = []
    assert speed._median_seconds(lambda: calls.append(None), torch.device("cpu")) == 2.0
    assert len(calls) == 4


def test_speed_is_measured_on_the_device_of_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    made = model("attention h3").to("fake")
    with watch() as counts:
        assert train_tokens_per_second(made, 16) > 0
        assert decode_tokens_per_second(made, 16) > 0
    assert counts.device
    assert counts.heavy_on_cpu == set()
    assert "randint" not in counts.cpu


def test_work_on_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    speed._median_seconds(lambda: None, torch.device("cuda:1"))
    assert waits == [torch.device("cuda:1")] * 4  # after the first call, and after each timed one
    speed._median_seconds(lambda: None, torch.device("cpu"))
    assert len(waits) == 4


def test_products_are_computed_in_the_precision_that_is_asked_for() -> None:
    made, seen = model("feed_forward"), set[torch.dtype]()
    made.stack.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    made.stack.links[0].layer.out_proj.register_forward_hook(
        lambda _module, _inputs, output: seen.add(output.dtype)
    )
    train_tokens_per_second(made, 16)
    assert seen == {torch.float32}
    train_tokens_per_second(made, 16, precision="bfloat16")
    assert torch.bfloat16 in seen
