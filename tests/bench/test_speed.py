import math
import random
from collections.abc import Callable

import pytest
import torch

from stateline.bench import side_by_side, speed, timing
from stateline.bench.side_by_side import Timed, measure
from stateline.bench.speed import Cell, Subject
from stateline.bench.timing import Timing
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

if not torch.cuda.is_available():  # the simulated device cannot stand beside a GPU
    from tests.devices import watch

CELLS = [Cell("prefill", 16, 2), Cell("decode", 16, 2), Cell("train", 16, 4)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "DECODE_STEPS", 4)
    monkeypatch.setattr(side_by_side, "peak_bytes", lambda *_: 1)


def model(pattern: str, **settings: int) -> LanguageModel:
    return LanguageModel(ModelConfig(pattern, vocab_size=10, d_model=8, **settings))


@pytest.mark.parametrize("pattern", ["attention h3", "ladder(s4d lstm)"])
def test_every_phase_of_every_model_has_a_speed(pattern: str) -> None:
    found = measure({"one": Subject(model(pattern)), "two": Subject(model("lstm"))}, CELLS, 0.0)
    assert list(found) == ["one", "two"]
    for measured in found.values():
        assert [m.cell for m in measured] == CELLS
        for low, median, high in filter(None, (m.spread for m in measured)):
            assert 0 < low <= median <= high < math.inf
        assert not any(m.skipped for m in measured)


def test_a_speed_is_tokens_over_seconds() -> None:
    for cell, tokens in zip(CELLS, (32, 8, 64), strict=True):
        measured = Timed(cell, Timing(9.0, (1.0, 2.0, 4.0)))
        assert measured.speeds == (tokens, tokens / 2, tokens / 4)
        assert measured.spread == (tokens / 4, tokens / 2, tokens)  # too few for quartiles


def test_of_many_rounds_the_spread_is_that_of_the_quartiles() -> None:
    measured = Timed(Cell("train", 1, 1), Timing(9.0, tuple(1 / n for n in range(1, 102))))
    assert measured.spread == pytest.approx((26, 51, 76))


def test_a_training_batch_has_as_many_rows_as_make_the_tokens() -> None:
    assert [speed.train_batch(length) for length in (256, 1024, 4096, 65536)] == [16, 4, 1, 1]


def test_calls_have_the_shapes_of_their_cell() -> None:
    made, shapes = model("h3"), set[torch.Size]()
    made.stack.register_forward_hook(lambda _module, inputs, _out: shapes.add(inputs[0].shape))
    Subject(made).call(Cell("train", 16, 4))()
    assert shapes == {torch.Size([4, 16, 8])}


def test_every_round_of_decoding_starts_after_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made, positions = model("attention h3"), list[list[int]]()
    step = made.step_

    def watched(token: torch.Tensor, state: object) -> torch.Tensor:
        positions.append(state.position.tolist())  # type: ignore[attr-defined]
        return step(token, state)

    monkeypatch.setattr(made, "step_", watched)
    subject = Subject(made)
    for context in (16, 20, 8):  # a longer prompt goes on from a shorter one
        call = subject.call(Cell("decode", context, 2))
        call()
        call()
        expected = [[context + step] * 2 for step in range(4)]
        assert positions == expected * 2
        positions.clear()


def test_a_longer_prompt_is_read_from_where_the_shorter_ended() -> None:
    made, read = model("h3"), list[int]()
    chunk = made.forward_chunk
    made.forward_chunk = lambda x, state, **options: (  # type: ignore[method-assign]
        read.append(x.shape[1]),
        chunk(x, state, **options),
    )[1]
    subject = Subject(made)
    for context in (16, 20, 20, 8):
        subject.call(Cell("decode", context, 1))
    assert [length for length in read if length] == [16, 4, 8]


def test_training_steps_forget_the_prompt() -> None:
    subject = Subject(model("h3"))
    subject.call(Cell("decode", 16, 1))
    subject.call(Cell("train", 16, 1))
    assert subject._prompt is None


class Clock:
    """Time passes only in calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(side_by_side, "peak_bytes", lambda *_: None)

    def call(self, seconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds()

        return run


class Pretended(Subject):
    """A subject whose calls take as long as they are said to."""

    device = torch.device("cpu")

    def __init__(self, clock: Clock, seconds: Callable[[], float]) -> None:
        self.clock, self.seconds = clock, seconds

    def call(self, cell: Cell) -> Callable[[], None]:
        return self.clock.call(self.seconds)

    def flops(self, cell: Cell) -> float:
        return float(cell.tokens)

    def bytes(self, cell: Cell) -> float:
        return 0.0

    def limit(self, cell: Cell) -> str:
        return ""


def speeds_of(*seconds: Callable[[], float], clock: Clock) -> list[Timed]:
    subjects = {str(n): Pretended(clock, call) for n, call in enumerate(seconds)}
    found = measure(subjects, [Cell("prefill", 100, 1)], 0.4)
    return [found[name][0] for name in subjects]


def noise(seed: int, busy: bool) -> Callable[[], float]:
    """Calls of 30 ms, with 2 % of noise, or on a busy machine sometimes twice as long."""
    draw = random.Random(seed)

    def seconds() -> float:
        slow = 1.0 + draw.random() if busy and draw.random() < 0.4 else 1.0
        return 0.03 * slow * (1 + 0.02 * draw.gauss(0, 1))

    return seconds


def overlap(one: Timed, other: Timed) -> bool:
    assert one.spread
    assert other.spread
    return one.spread[0] <= other.spread[2] and other.spread[0] <= one.spread[2]


@pytest.mark.parametrize("busy", [False, True])
def test_equal_models_agree_within_their_spread_and_one_of_half_the_speed_does_not(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    for trial in range(20):
        one, other = noise(2 * trial, busy), noise(2 * trial + 1, busy)
        equal = speeds_of(one, other, clock=clock)
        assert overlap(*equal)
        different = speeds_of(one, lambda call=other: 3 * call(), clock=clock)  # type: ignore[misc]
        assert not overlap(*different)


def test_a_disturbance_that_lasts_a_while_hits_all_models_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)

    def seconds() -> float:
        return 0.09 if clock.now > 0.5 else 0.03  # another program starts after half a second

    assert overlap(*speeds_of(seconds, seconds, clock=clock))


def test_calls_that_take_too_long_are_left_out_and_longer_ones_are_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    subjects = {"slow": Pretended(clock, lambda: 5.0), "fast": Pretended(clock, lambda: 0.1)}
    cells = [Cell("prefill", 100, 1), Cell("prefill", 200, 1), Cell("decode", 10_000, 1)]
    found = measure(subjects, cells, 0.0)
    assert [m.skipped for m in found["fast"]] == ["", "", ""]
    assert [m.skipped for m in found["slow"]] == [
        "prefill takes 5 s a call",
        "prefill would take about 10 s a call",
        "prefill would take about 500 s a call",
    ]


def test_a_first_call_that_compiles_does_not_make_a_model_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, calls = Clock(monkeypatch), iter([20.0])
    cells = [Cell("prefill", 100, 1), Cell("prefill", 200, 1)]
    found = measure({"one": Pretended(clock, lambda: next(calls, 0.1))}, cells, 0.0)["one"]
    assert [m.skipped for m in found] == ["", ""]
    assert found[0].timing is not None
    assert found[0].timing.first == 20.0
    assert found[0].spread == pytest.approx((980, 1000, 1020))  # as wide as placement in memory


def test_what_needs_too_much_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "available_bytes", lambda _: 1000)
    for measured in measure({"one": Subject(model("h3"))}, CELLS, 0.0)["one"]:
        assert measured.skipped.startswith("needs about ")
    monkeypatch.setattr(side_by_side, "available_bytes", lambda _: None)
    assert not measure({"one": Subject(model("h3"))}, CELLS[:1], 0.0)["one"][0].skipped


def test_the_memory_of_a_cell_grows_with_its_rows() -> None:
    subject = Subject(model("attention"))
    for phase in ("prefill", "decode", "train"):
        one, many = (subject.bytes(Cell(phase, 512, rows)) for rows in (1, 64))  # type: ignore[arg-type]
        assert many == 64 * one > 0


def test_lengths_beyond_learned_positions_are_left_out() -> None:
    subjects = {"limited": Subject(model("attention", max_len=18)), "other": Subject(model("h3"))}
    found = measure(subjects, CELLS, 0.0)
    assert [m.skipped for m in found["limited"]] == ["", "max_len is 18", ""]
    assert not any(m.skipped for m in found["other"])


def test_a_cell_that_fails_is_left_out_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = Subject(model("h3"))

    def fail(*_: object) -> None:
        raise RuntimeError("cannot allocate memory\nand more")

    monkeypatch.setattr(subject, "_prefill", fail)
    first, *others = measure({"one": subject}, CELLS, 0.0)["one"]
    assert first.skipped == "cannot allocate memory"
    assert all(m.spread for m in others)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its device is simulated")
def test_speed_is_measured_on_the_device_of_the_model_alone() -> None:
    subject = Subject(model("attention h3").to("fake"))
    with watch() as counts:
        for cell in CELLS:
            subject.call(cell)()
    assert counts.device
    assert counts.heavy_on_cpu == set()
    assert "randint" not in counts.cpu


def test_work_on_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(None))
    timing.interleave({"one": lambda: None}, rounds=2, device="mps")
    assert len(waits) == 8  # before and after each of four calls
    timing.interleave({"one": lambda: None}, rounds=2, device="cpu")
    assert len(waits) == 8


def test_products_are_computed_in_the_precision_that_is_asked_for() -> None:
    made, seen = model("feed_forward"), set[torch.dtype]()
    made.stack.links[0].layer.out_proj.register_forward_hook(
        lambda _module, _inputs, output: seen.add(output.dtype)
    )
    Subject(made).call(Cell("train", 16, 1))()
    assert seen == {torch.float32}
    Subject(made, "bfloat16").call(Cell("train", 16, 1))()
    assert torch.bfloat16 in seen


def test_training_in_half_precision_needs_less_memory() -> None:
    single, half = (Subject(model("h3"), of).bytes(CELLS[2]) for of in ("float32", "bfloat16"))
    assert half < single
