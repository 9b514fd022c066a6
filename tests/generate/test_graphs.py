"""Decoding by recorded graphs gives the texts of decoding without."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.generate import graphs
from stateline.generate.graphs import Graphs
from stateline.generate.sampling import Sampling
from stateline.generate.session import Session
from stateline.generate.session_state import prefill
from stateline.layers import LAYERS
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

PATTERNS = ["h3 attention(position=rope)", "mamba gated_delta_net", "s4d lstm"]
READING = ["block_recurrent", "moe"]
"""Layers whose steps read on the host: whether a window ends, and in float32, sizes of groups."""
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Recorder:
    """Repeats a call as a graph does: on the same memory, into the same output, nothing in Python.

    Attributes:
        recorded: Number of graphs.
        replayed: Number of replays.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.recorded += 1
        logits = call()

        def replay() -> None:
            self.replayed += 1
            logits.copy_(call())

        return replay, logits


def make(pattern: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, vocab_size=11, d_model=16)).eval()


def session(model: LanguageModel, record: Any, **options: Any) -> Session:
    prompt = PROMPT.to(model.embedding.weight.device)
    made = Session(model, prefill(model, prompt, seed=3), **options)
    made._graphs = None  # the default on CUDA devices
    if record is not None:
        made.use_graphs(record)
    return made


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_are_the_same(pattern: str) -> None:
    model, recorder = make(pattern), Recorder()
    sampling = Sampling(temperature=1.0)
    plain, recorded = (
        session(model, record, sampling=sampling, room=4) for record in (None, recorder)
    )
    for _ in range(6):
        one, two = plain.step(), recorded.step()
        assert torch.equal(one.tokens, two.tokens)
        torch.testing.assert_close(one.logits, two.logits)
    assert recorder.replayed >= 6
    for a, b in zip(*(map(str, s.state().model) for s in (plain, recorded)), strict=True):
        assert a == b


def test_rows_leave_and_join_between_graphs() -> None:
    model, recorder = make(PATTERNS[0]), Recorder()
    plain, recorded = (session(model, record) for record in (None, recorder))
    for made in (plain, recorded):
        made.step()
        made.select([1])
        made.step()
        made.join(prefill(model, torch.tensor([[7, 8]])))
    assert torch.equal(plain.step().tokens, recorded.step().tokens)
    assert recorder.recorded == 2  # of one and of two rows


def test_a_graph_is_used_again_for_the_same_shapes() -> None:
    model, recorder = make("h3"), Recorder()
    made = session(model, recorder, room=2)
    for _ in range(7):
        made.step()
    assert recorder.recorded == 1


def test_batches_of_a_bucket_share_a_graph() -> None:
    model, recorder = make("h3 attention(position=rope)"), Recorder()
    plain, recorded = (session(model, record) for record in (None, recorder))
    for made in (plain, recorded):
        for prompt in ([[7, 8, 9]], [[5]], [[2, 6]]):  # 3, 4 and 5 rows
            made.join(prefill(model, torch.tensor(prompt), seed=9))
            made.step()
        made.select([4, 0, 2])
        made.step()
        made.select([1, 0, 2])
    assert torch.equal(plain.step().logits.argmax(-1), recorded.step().logits.argmax(-1))
    states = (made.state() for made in (plain, recorded))
    for a, b in zip(*map(pytree.tree_leaves, states), strict=True):
        torch.testing.assert_close(a, b)
    assert recorder.recorded == 2  # of 4 and of 8 rows


def test_the_kept_choice_is_not_overwritten_by_the_next_step() -> None:
    made = session(make("h3"), Recorder())
    first = made.step()
    kept = first.logits.clone()
    made.step()
    torch.testing.assert_close(first.logits, kept, rtol=0, atol=0)


def test_a_graph_that_differs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Its second step shows a number that the graph holds as a constant."""

    def frozen(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        return (lambda: None), call()

    model = make(PATTERNS[0])
    plain, recorded = session(model, None), session(model, frozen)
    for _ in range(3):
        assert torch.equal(plain.step().tokens, recorded.step().tokens)
    assert len(caplog.messages) == 1
    assert "without graphs, kernel by kernel: a graph's logits differ" in caplog.text


def test_a_step_that_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = make(PATTERNS[0])
    with caplog.at_level(logging.WARNING):
        plain, recorded = session(model, None), session(model, refuse)
        for _ in range(2):
            assert torch.equal(plain.step().tokens, recorded.step().tokens)
    assert caplog.text.count("not permitted") == 1


def test_no_graph_stays_in_memory_after_one_that_had_no_room() -> None:
    """Each holds the memory of a state. Other sizes may have graphs again, this one has none."""
    recorder, tried = Recorder(), list[int]()

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        replay, logits = recorder(call)
        tried.append(len(logits))
        if len(logits) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replay, logits

    made = Graphs(lambda tokens, state: tokens + state, record)
    for rows, kept in ((1, 1), (2, 0), (2, 0), (1, 1)):
        assert made(torch.zeros(rows), torch.ones(rows))[0].tolist() == [1.0] * rows
        assert sum(graph is not None for graph in made._graphs.values()) == kept
    assert tried == [1, 2, 1]


def test_graphs_that_were_not_used_for_longest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    recorder = Recorder()
    made = Graphs(lambda tokens, state: tokens.float() + state, recorder)
    for rows, recorded in ((1, 1), (2, 2), (1, 2), (4, 3), (1, 3), (2, 4)):
        made(torch.zeros(rows), torch.zeros(rows))
        assert recorder.recorded == recorded
    assert len(made._graphs) == 2


def test_a_graph_is_compared_with_a_step_of_as_many_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels for another number of rows round in another way, in bfloat16 by some percent."""

    def step(tokens: Tensor, state: Tensor) -> Tensor:
        return (tokens + state.add_(1)) * (1 + 0.02 * len(tokens))

    made = Graphs(step, Recorder())
    logits, _ = made(torch.ones(3), torch.ones(3))  # in a graph of 4 rows
    torch.testing.assert_close(logits, torch.full((3,), 3 * 1.08))
    assert not caplog.messages


@pytest.mark.parametrize("room", [1, 4])
def test_a_state_has_room_for_the_steps_that_try_a_graph(
    room: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("attention")
    plain = session(model, None, room=room)
    recorded = session(model, Recorder(), room=room)
    for _ in range(6):
        assert torch.equal(plain.step().tokens, recorded.step().tokens)
    assert not caplog.messages


def test_a_graph_is_recorded_on_the_device_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        assert [tensor.tolist() for tensor in current] == [[3.0]]
        return Recorder()(call)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    made = Graphs(lambda tokens, state: tokens + state, record)
    assert made(torch.full((1,), 3.0), torch.zeros(1))[0].tolist() == [3.0]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_graph_is_not_tried_beyond_the_last_position(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, nothing else than an assertion of the device would stop it."""
    monkeypatch.setattr("stateline.models.inputs.values_at_hand", lambda _: False)
    config = ModelConfig("attention", vocab_size=11, d_model=16, max_len=PROMPT.shape[1] + steps)
    model = LanguageModel(config).eval()
    plain, recorded = session(model, None), session(model, Recorder())
    for _ in range(steps + 1):  # the last token is not read
        assert torch.equal(plain.step().tokens, recorded.step().tokens)
    for made in (plain, recorded):
        with pytest.raises(InputError, match="max_len"):
            made.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_session_records_its_own_graphs(copied: Callable[[Session], Session]) -> None:
    made = session(make(PATTERNS[0]), Recorder())
    made.step()
    other = copied(made)
    assert torch.equal(made.step().tokens, other.step().tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pattern", [*PATTERNS, *(k for k in LAYERS if k not in READING)])
def test_cuda_graphs_give_the_same_texts(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make(pattern).cuda()
    plain, recorded = session(model, None), session(model, graphs.record_cuda)
    for _ in range(5):
        assert torch.equal(plain.step().tokens, recorded.step().tokens)
    assert not caplog.messages


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pattern", READING)
def test_a_cuda_graph_that_fails_leaves_the_device_usable(
    pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = make(pattern).cuda(), make(PATTERNS[0]).cuda()
    wanted, before = session(other, None), session(other, graphs.record_cuda)
    assert torch.equal(wanted.step().tokens, before.step().tokens)
    plain, recorded = session(model, None), session(model, graphs.record_cuda)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert torch.equal(plain.step().tokens, recorded.step().tokens)
    assert caplog.text.count("decoding runs without graphs") == 1
    assert torch.randn(3, device="cuda").isfinite().all()
    assert torch.equal(wanted.step().tokens, before.step().tokens)
    caplog.clear()
    assert session(other, graphs.record_cuda).step().tokens.is_cuda
    assert not caplog.messages
