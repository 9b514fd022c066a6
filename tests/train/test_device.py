"""Training on a simulated accelerator: it computes there alone, and the host seldom waits."""

import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from stateline.evaluate import score_text
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Text
from stateline.tasks.base import Batch
from stateline.train.batches import Batches
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.processes import Processes
from tests.devices import watch

pytestmark = pytest.mark.cpu  # each test chooses its devices

FAKE = Processes(device=torch.device("fake", 0))
CARRY = {"carry_state": True, "carry_cap": 48, "segment_len": 7, "accumulate": 2}


def model(pattern: str = "h3 attention(position=rope)") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, vocab_size=256, d_model=8))


def config(**settings: Any) -> TrainConfig:
    defaults = {"steps": 3, "warmup_steps": 0, "eval_every": 0, "log_every": 1, "lr": 1e-2}
    return TrainConfig(**{**defaults, **settings})


@pytest.mark.parametrize("settings", [{}, CARRY], ids=["whole", "carried"])
def test_training_computes_on_its_device_alone(text: Text, settings: dict[str, Any]) -> None:
    here, there = model(), model().to("fake")
    wanted = train(here, text, config(**settings))
    with watch() as counts:
        found = train(there, text, config(**settings), processes=FAKE)
    assert counts.heavy_on_cpu == set()
    losses = [[metrics.loss for metrics in result.curve] for result in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [("h3 attention(position=rope)", {"accumulate": 3}), ("h3 s4d", CARRY)],
    ids=["accumulated", "carried"],
)
def test_the_host_waits_once_per_update(text: Text, pattern: str, settings: dict[str, Any]) -> None:
    reads = []
    for steps in (1, 3):
        with watch() as counts:
            made = model(pattern).to("fake")
            train(made, text, config(steps=steps, **settings), processes=FAKE)
        reads.append(counts.reads)
    assert reads[1] - reads[0] == 2


def test_a_run_on_a_device_continues_from_its_checkpoint(text: Text, tmp_path: Any) -> None:
    calls = iter(range(9))
    settings = config(steps=3, **CARRY)
    whole = train(model().to("fake"), text, settings, processes=FAKE)
    train(
        model().to("fake"),
        text,
        settings,
        folder=tmp_path,
        processes=FAKE,
        interrupted=lambda: next(calls) == 1,
    )
    rest = train(model().to("fake"), text, settings, folder=tmp_path, processes=FAKE)
    assert [m.loss for m in rest.curve] == [m.loss for m in whole.curve]


def test_a_text_is_scored_on_the_device_of_the_model() -> None:
    made, tokens = model().eval(), torch.arange(300) % 256
    for options in ({"chunk": 64}, {"window": 32}):
        wanted = score_text(made.to("cpu"), [tokens], **options).losses.means()
        made.to("fake")
        with watch() as counts:
            found = score_text(made, [tokens], **options).losses.means()
        assert counts.heavy_on_cpu == set()
        assert found == pytest.approx(wanted, rel=1e-6)
        made = model().eval()


def test_batches_built_ahead_are_those_built_in_time(text: Text) -> None:
    ahead, in_time = (Batches(text, config(steps=4, **CARRY), p) for p in (FAKE, Processes()))
    for step in (0, 1, 2, 0, 3):  # also out of order
        for found, wanted in zip(ahead.update(step), in_time.update(step), strict=True):
            assert found.tokens.cpu().equal(wanted.tokens)
            assert found.targets.cpu().equal(wanted.targets)
            assert found.fresh is not None
            assert found.fresh.equal(wanted.fresh)
    ahead.close()


def batch_threads(text: Text, monkeypatch: pytest.MonkeyPatch, processes: Processes) -> set[bool]:
    """Whether batches were built in the main thread."""
    threads, given = set[bool](), text.train_batch

    def noted(index: int) -> Batch:
        threads.add(threading.current_thread() is threading.main_thread())
        return given(index)

    monkeypatch.setattr(text, "train_batch", noted)
    train(model().to(processes.device), text, config(), processes=processes)
    return threads


def test_batches_are_built_ahead_on_accelerators_only(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch_threads(text, monkeypatch, Processes()) == {True}
    assert batch_threads(text, monkeypatch, FAKE) == {False}


def test_each_batch_is_built_once_and_none_beyond_the_end(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, given = list[int](), text.train_batch
    monkeypatch.setattr(text, "train_batch", lambda n: (built.append(n), given(n))[1])
    batches = Batches(text, config(steps=4, accumulate=2), FAKE)
    for step in range(4):
        batches.update(step)
    batches.close()
    assert built == list(range(8))


def test_a_mistake_in_the_thread_ends_the_run(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    given = text.train_batch

    def failing(index: int) -> Batch:
        if index == 2:
            raise OSError("the disk is gone")
        return given(index)

    monkeypatch.setattr(text, "train_batch", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        train(model().to("fake"), text, config(), processes=FAKE)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.slow
@pytest.mark.usefixtures("unannotated")
@pytest.mark.filterwarnings("ignore")  # of the compiler itself
@pytest.mark.parametrize(
    "settings", [{}, CARRY, {"loss_chunk": 9}], ids=["whole", "carried", "chunked loss"]
)
@pytest.mark.parametrize("documents", ["join", "pack"])
def test_a_compiled_update_is_that_of_eager_mode(
    tmp_path: Path, documents: Literal["join", "pack"], settings: dict[str, Any]
) -> None:
    for number in range(60):
        (tmp_path / str(number)).write_bytes(bytes(97 + n * n % 23 for n in range(5 + number)))
    text = Text(path=str(tmp_path), length=16, batch_size=4, documents=documents)
    made = [model(), model()]
    losses = [
        train(one, text, config(steps=1, compile=compiled, **settings)).curve[0].loss
        for one, compiled in zip(made, (False, True), strict=True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for one, other in zip(*(m.parameters() for m in made), strict=True):
        # by norm: AdamW makes whole steps of rounding errors where a gradient is next to nothing
        assert (one - other).norm() <= 1e-2 * one.norm() + 1e-6
