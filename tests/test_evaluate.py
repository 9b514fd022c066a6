import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.data import ByteTokenizer, CharacterTokenizer
from stateline.errors import InputError
from stateline.evaluate import Buckets, evaluate, evaluate_by_position, score_file, score_text
from stateline.evaluate.division import Division, by_rows, dividing
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import (
    IGNORE,
    Batch,
    ConsecutiveBatch,
    CorpusTask,
    GeneratedTask,
    Problems,
    Text,
    make_task,
)

VOCAB = 5


def successor_model() -> LanguageModel:
    """A model that after n expects n + 1, and after the last token the first."""
    config = ModelConfig("feed_forward", VOCAB, VOCAB, tie_embeddings=False)
    made = LanguageModel(config)
    with torch.no_grad():
        made.embedding.weight.copy_(torch.eye(VOCAB))
        made.stack.links[0].layer.out_proj.weight.zero_()
        made.head.weight.copy_(torch.eye(VOCAB).roll(1, dims=0))
    return made


class Counting(GeneratedTask):
    """Count on from a number; of batch i, the first i answers of 4 end with a wrong token."""

    metric = "accuracy"
    vocab_size = VOCAB

    def train_batch(self, index: int) -> Batch:
        raise NotImplementedError

    def problems(self, length: int, index: int) -> Problems:
        numbers = (torch.arange(4)[:, None] + torch.arange(length + 3)) % VOCAB
        answers = numbers[:, length:].clone()
        answers[:index, -1] = (answers[:index, -1] + 1) % VOCAB
        return Problems(numbers[:, :length], answers)


class Numbers(CorpusTask):
    """Two batches of different sizes, with targets that nobody scores."""

    metric = "bits"
    vocab_size = VOCAB
    train_length = 8

    def train_batch(self, index: int) -> Batch:
        raise NotImplementedError

    def consecutive_batch(self, index: int) -> ConsecutiveBatch:
        raise NotImplementedError

    def held_out(self, length: int) -> Iterator[Batch]:
        yield Batch(torch.tensor([[0, 1, 2], [4, 3, 3]]), torch.tensor([[1, 2, 3], [0, 0, IGNORE]]))
        yield Batch(torch.tensor([[2, 2, 2]]), torch.tensor([[1, IGNORE, IGNORE]]))

    def baselines(self) -> Mapping[str, float]:
        raise NotImplementedError


@pytest.mark.cpu  # its task makes tensors
def test_a_model_that_is_always_right_scores_one() -> None:
    assert evaluate(successor_model(), Counting(), 4, batches=1) == {"accuracy": 1.0}


class Skipping(Counting):
    """Count from 0, but leave out 2; how many numbers are right."""

    metric = "numbers"

    def problems(self, length: int, index: int) -> Problems:
        return Problems(torch.tensor([[0], [0]]), torch.tensor([[1, 3, 4], [1, IGNORE, IGNORE]]))

    def score(self, answers: Tensor, predictions: Tensor) -> dict[str, float]:
        return {self.metric: float((answers == predictions).sum())}


@pytest.mark.cpu  # its task makes tensors
def test_with_teacher_forcing_a_mistake_is_not_passed_on() -> None:
    task = Skipping()
    assert evaluate(successor_model(), task, 1, batches=1) == {"numbers": 2.0}
    task.teacher_forcing = True
    assert evaluate(successor_model(), task, 1, batches=1) == {"numbers": 3.0}


def test_bits_per_token_become_bits_per_byte() -> None:
    task = Numbers()
    task.bytes_per_token = 4.0
    uniform = successor_model()
    torch.nn.init.zeros_(uniform.head.weight)
    wanted = math.log2(VOCAB) / 4
    assert evaluate(uniform, task, 3, batches=0)["bits"] == pytest.approx(wanted)


@pytest.mark.cpu  # its task makes tensors
def test_the_score_is_the_mean_over_the_batches() -> None:
    assert evaluate(successor_model(), Counting(), 4, batches=3) == {
        "accuracy": pytest.approx((1 + 0.75 + 0.5) / 3)
    }


@pytest.mark.cpu  # its task makes tensors
def test_a_metric_must_be_a_score() -> None:
    task = Counting()
    task.metric = "share_right"
    with pytest.raises(InputError, match=r"must be one of its scores, accuracy, .*'share_right'"):
        evaluate(successor_model(), task, 4, batches=1)


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary() -> None:
    uniform = successor_model()
    torch.nn.init.zeros_(uniform.head.weight)
    assert evaluate(uniform, Numbers(), 3, batches=0)["bits"] == pytest.approx(math.log2(VOCAB))


def bits_by_hand() -> tuple[float, float]:
    """Bits of a right and of a wrong successor: the embedding is normalised, then compared."""
    deviation = math.sqrt((1 / VOCAB) * (1 - 1 / VOCAB) + 1e-5)
    right, wrong = (1 - 1 / VOCAB) / deviation, (-1 / VOCAB) / deviation
    total = math.log(math.exp(right) + (VOCAB - 1) * math.exp(wrong))
    return (total - right) / math.log(2), (total - wrong) / math.log(2)


def test_every_scored_target_weighs_the_same() -> None:
    right, wrong = bits_by_hand()
    found = evaluate(successor_model(), Numbers(), 3, batches=0)
    bits = (4 * right + 2 * wrong) / 6
    assert found == {"bits": pytest.approx(bits), "perplexity": pytest.approx(2**bits)}


def test_a_corpus_is_read_as_far_as_asked() -> None:
    right, wrong = bits_by_hand()
    found = evaluate(successor_model(), Numbers(), 3, batches=1)
    bits = (4 * right + wrong) / 5
    assert found == {"bits": pytest.approx(bits), "perplexity": pytest.approx(2**bits)}


def test_losses_come_by_position_in_buckets_that_double() -> None:
    right, wrong = bits_by_hand()
    assert evaluate_by_position(successor_model(), Numbers(), 3) == {
        1: pytest.approx((2 * right + wrong) / 3),
        2: pytest.approx((right + wrong) / 2),
        3: pytest.approx(right),
    }


def test_losses_by_position_are_per_byte() -> None:
    task = Numbers()
    task.bytes_per_token = 2.0
    whole = evaluate_by_position(successor_model(), Numbers(), 3)
    half = evaluate_by_position(successor_model(), task, 3)
    assert half == {end: pytest.approx(bits / 2) for end, bits in whole.items()}
    found = evaluate(successor_model(), task, 3, batches=0)["bits"]
    assert found == pytest.approx(evaluate(successor_model(), Numbers(), 3, batches=0)["bits"] / 2)


def test_the_mean_of_the_losses_by_position_is_the_score() -> None:
    task = Text(length=64, held_out_bytes=700)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3(d_state=8)", 256, 8))
    buckets = evaluate_by_position(model, task, 100)
    assert list(buckets) == [8, 16, 32, 64, 100]
    shares = [8 * 7, 8 * 7, 16 * 7, 32 * 7, 36 * 6 + 35]  # six windows of 100, one of 99
    mean = sum(n * bits for n, bits in zip(shares, buckets.values(), strict=True)) / 699
    assert mean == pytest.approx(evaluate(model, task, 100, batches=0)["bits_per_byte"], 1e-5)


@pytest.mark.parametrize("carried", [False, True])
def test_the_logits_of_some_positions_are_in_memory_at_a_time(
    monkeypatch: pytest.MonkeyPatch, carried: bool
) -> None:
    task = Text(length=64, held_out_bytes=1001, batch_size=2, carried=carried)
    torch.manual_seed(0)
    model, sizes = LanguageModel(ModelConfig("lstm", 256, 8)).double(), list[int]()
    whole = evaluate(model, task, 64)
    monkeypatch.setattr("stateline.evaluate.losses._LOGITS", 50 * 256)
    model.norm.register_forward_hook(lambda *given: sizes.append(given[2].shape[:2].numel()))
    assert evaluate(model, task, 64) == pytest.approx(whole, rel=1e-6)  # added in float32
    assert max(sizes) <= 50 < sum(sizes)


def test_a_corpus_can_be_scored_with_carried_state() -> None:
    task = Text(length=64, held_out_bytes=1001, batch_size=2, carried=True)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3(d_state=8) attention(position=rope)", 256, 8))
    text = task._held_out
    halves = [torch.tensor(text.read(*part).astype(int))[None] for part in ((0, 513), (512, 1001))]
    with torch.inference_mode():
        losses = [F.cross_entropy(model(x[:, :-1])[0], x[0, 1:], reduction="sum") for x in halves]
    found = evaluate(model, task, 64, batches=0)["bits_per_byte"]
    assert found == pytest.approx(float(sum(losses)) / 1000 / math.log(2), 1e-5)


@pytest.mark.cpu  # its task makes tensors
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("task", [Counting(), Numbers()], ids=["generated", "corpus"])
def test_the_mode_is_as_it_was_and_evaluation_inside(
    task: Counting | Numbers, training: bool
) -> None:
    made = successor_model().train(training)
    modes: set[bool] = set()
    made.norm.register_forward_hook(lambda module, *_: modes.add(module.training))
    evaluate(made, task, 4, batches=1)
    assert modes == {False}
    assert made.training is training


def test_the_mode_is_as_it_was_after_a_mistake() -> None:
    made = successor_model().train()
    with pytest.raises(InputError):
        evaluate(made, Counting(), 0)
    assert made.training


KINDS = ["h3(d_state=8)", "lstm s4d(d_state=8)", "attention(position=rope)", "h3 attention"]
KINDS += ["ladder(attention(position=alibi) h3(d_state=8))"]


def text_model(pattern: str, **settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, VOCAB, 8, **settings)).double().eval()


TOKENS = torch.randint(VOCAB, (150,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def losses_at_once(model: LanguageModel, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")


def pieces_of(tokens: Tensor) -> list[Tensor]:
    return list(tokens.split([1, 0, 7, 70, 1, len(tokens) - 79]))


@pytest.mark.parametrize("chunk", [3, 16, 1000])
@pytest.mark.parametrize("pattern", KINDS)
def test_a_text_scored_with_carried_state_is_scored_as_at_once(pattern: str, chunk: int) -> None:
    model = text_model(pattern)
    losses = losses_at_once(model, TOKENS)
    found = score_text(model, pieces_of(TOKENS), chunk=chunk).losses
    wanted = {64: losses[:64].mean(), 128: losses[64:128].mean(), 256: losses[128:].mean()}
    assert found.means() == {end: pytest.approx(float(m), 1e-10) for end, m in wanted.items()}
    assert found.counts == {64: 64, 128: 64, 256: 21}


@pytest.mark.parametrize(("window", "stride"), [(16, 4), (16, 16), (10, 7), (149, 3), (500, 1)])
@pytest.mark.parametrize("pattern", ["attention(position=rope)", "h3(d_state=8)"])
def test_windows_score_every_token_once_after_enough_others(
    pattern: str, window: int, stride: int
) -> None:
    model = text_model(pattern)
    wanted = []
    for place in range(1, len(TOKENS)):  # the first window that reaches this far
        start = max(0, -(-(place - window) // stride) * stride)
        assert place - start >= min(place, window - stride)
        wanted.append(float(losses_at_once(model, TOKENS[start : place + 1])[-1]))
    found = score_text(model, pieces_of(TOKENS), window=window, stride=stride).losses
    assert found.count == len(wanted)
    assert found.mean == pytest.approx(sum(wanted) / len(wanted), 1e-10)


def test_losses_of_windows_come_by_position_in_the_window() -> None:
    model = text_model("attention(position=rope)")
    found = score_text(model, pieces_of(TOKENS), window=100, stride=50).losses
    first = losses_at_once(model, TOKENS[:101])
    second = losses_at_once(model, TOKENS[50:])[50:]  # at positions 51 to 99
    wanted = {64: (first[:64], second[:14]), 100: (first[64:], second[14:])}
    means = {end: float(torch.cat(parts).mean()) for end, parts in wanted.items()}
    assert found.means() == {end: pytest.approx(mean, 1e-10) for end, mean in means.items()}
    assert found.counts == {64: 78, 100: 71}


def test_windows_overlap_by_half_unless_told() -> None:
    model = text_model("h3(d_state=8)")
    found, wanted = (score_text(model, [TOKENS], window=20, stride=s) for s in (None, 10))
    assert found.losses.means() == wanted.losses.means()


def test_windows_fit_learned_positions_however_long_the_text() -> None:
    model = text_model("attention", max_len=12)
    assert score_text(model, [TOKENS], window=12).losses.count == 149
    with pytest.raises(InputError, match="made for max_len=12 tokens, got 13"):
        score_text(model, [TOKENS], window=13)


def test_scoring_a_text_keeps_no_more_than_the_state() -> None:
    """Each piece is gone before the next but one comes."""
    model, alive = text_model("lstm"), []

    def pieces() -> Iterator[Tensor]:
        for _ in range(8):
            piece = torch.randint(VOCAB, (50,))
            alive.append(weakref.ref(piece))
            yield piece
            del piece
            assert sum(ref() is not None for ref in alive) <= 2

    score_text(model, pieces(), chunk=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk and window must be from 1 to 2147483647, .* got chunk=0"),
        ({"chunk": 2**63}, "got chunk=9223372036854775808"),
        ({"window": 2**63, "stride": 1}, "window=9223372036854775808"),
        ({"window": 8, "stride": 9}, "got chunk=1024, window=8 and stride=9"),
        ({"window": 8, "stride": 0}, "got chunk=1024, window=8 and stride=0"),
        ({"window": -1}, "got chunk=1024, window=-1 and stride=None"),
    ],
)
def test_lengths_that_cannot_be_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        score_text(text_model("lstm"), [TOKENS], **options)


@pytest.mark.parametrize("pieces", [[], [TOKENS[:0]], [TOKENS[:1]]])
@pytest.mark.parametrize("window", [None, 4])
def test_a_text_of_less_than_two_tokens_has_no_score(
    pieces: list[Tensor], window: int | None
) -> None:
    with pytest.raises(InputError, match="a text to score must have at least two tokens: give a"):
        score_text(text_model("lstm"), pieces, window=window)


def test_scores_of_texts_add_up() -> None:
    model = text_model("h3(d_state=8)")
    first, second = (score_text(model, [part]) for part in (TOKENS[:100], TOKENS[30:]))
    both = first + second
    assert both.losses.count == 99 + 119
    wanted = first.losses.mean * 99 + second.losses.mean * 119
    assert both.losses.mean * both.losses.count == pytest.approx(wanted)
    assert both.losses.counts == {64: 128, 128: 90}
    assert first.losses.count == 99  # as it was


def test_a_uniform_model_of_bytes_needs_eight_bits_a_byte(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("né 🙂 and\xff".encode() + b"\xff\x00\r\n" * 50)
    model = LanguageModel(ModelConfig("lstm", 256, 8)).eval()
    torch.nn.init.zeros_(model.embedding.weight)
    score = score_file(model, ByteTokenizer(), tmp_path / "text")
    assert score.losses.count == score.n_bytes == (tmp_path / "text").stat().st_size - 1
    assert score.bits_per_byte == pytest.approx(8)
    assert score.perplexity == pytest.approx(256, 1e-5)


def test_bytes_are_counted_whatever_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("né né né né")
    letters = CharacterTokenizer("né ")
    model = LanguageModel(ModelConfig("lstm", 3, 8)).eval()
    torch.nn.init.zeros_(model.embedding.weight)
    score = score_file(model, letters, tmp_path / "text")
    assert (score.losses.count, score.n_bytes) == (10, 14)
    assert score.bits_per_byte == pytest.approx(10 * math.log2(3) / 14)


def test_a_file_is_scored_after_the_token_that_begins_a_text(tmp_path: Path) -> None:
    class Begun(ByteTokenizer):
        beginning = (1,)

    (tmp_path / "text").write_text("né né")
    (tmp_path / "begun").write_text("\x01né né")
    model = LanguageModel(ModelConfig("h3", 256, 8)).eval()
    found = score_file(model, Begun(), tmp_path / "text")
    wanted = score_file(model, ByteTokenizer(), tmp_path / "begun")
    assert (found.losses.counts, found.losses.sums) == (wanted.losses.counts, wanted.losses.sums)
    assert found.n_bytes == 7


def test_positions_double_from_bucket_to_bucket() -> None:
    buckets = Buckets(3)
    buckets.add(torch.arange(1, 50), torch.ones(49))
    assert buckets.counts == {3: 3, 6: 3, 12: 6, 24: 12, 48: 24, 96: 1}


def test_means_come_in_order_and_from_exact_sums() -> None:
    buckets = Buckets(2)
    buckets.add(torch.tensor([3, 4]), torch.ones(2))
    buckets.add(torch.tensor([1, 2]), torch.tensor([2.0**24, 1.0]))  # no sum in float32
    assert list(buckets.means().items()) == [(2, (2.0**24 + 1) / 2), (4, 1.0)]


def test_perplexity_per_word_counts_words_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("one  two\nthree four\n\n five")
    model = LanguageModel(ModelConfig("h3", vocab_size=256, d_model=8)).eval()
    score = score_file(model, ByteTokenizer(), file)
    assert score.n_words == 5
    per_word = score.losses.mean * score.losses.count / 5
    assert score.word_perplexity == pytest.approx(math.exp(per_word))
    assert (score + score).n_words == 10


class Meeting:
    """Threads that stand for processes, and share values as these do."""

    def __init__(self, count: int) -> None:
        self.barrier, self.values = threading.Barrier(count), [None] * count

    def share(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def scored_together(count: int, score: Callable[[], Any], *, sharded: bool) -> list[Any]:
    """What each of several processes gets."""
    meeting = Meeting(count)

    def work(rank: int) -> Any:
        share = partial(meeting.share, rank)
        with dividing(Division(rank, count, share, sharded)):
            try:
                return score()
            except InputError as error:
                return str(error)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("kind", ["drawn", "labelled", "text", "carried"])
def test_processes_that_divide_the_rows_score_as_one(tmp_path: Path, kind: str, count: int) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(97 + n * n % 23 for n in range(3000)))
    text = {"path": str(tmp_path / "text.txt"), "length": 16, "batch_size": 4}
    tasks: dict[str, Callable[[], Any]] = {
        "drawn": lambda: make_task("copying(batch_size=5)"),
        "labelled": lambda: make_task("flip_flop(batch_size=5)"),
        "text": lambda: Text(**text),
        "carried": lambda: Text(**text, carried=True),
    }
    task = tasks[kind]()
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 attention", task.vocab_size, d_model=8)).double()
    wanted = evaluate(model, task, task.train_length)
    for sharded in (False, True):
        for found in scored_together(
            count, lambda: evaluate(model, tasks[kind](), task.train_length), sharded=sharded
        ):
            assert found == pytest.approx(wanted, rel=1e-6)  # losses are added in float32


def test_a_process_without_rows_computes_one_that_is_dropped() -> None:
    computed = []

    def compute(rows: Tensor) -> Tensor:
        computed.append(len(rows))
        return rows

    found = scored_together(3, lambda: by_rows(compute, torch.arange(2)), sharded=True)
    assert [rows.tolist() for rows in found] == [[0, 1]] * 3
    assert computed == [1, 1, 1]


def test_rows_are_divided_only_as_long_as_was_said() -> None:
    with dividing(Division(0, 2, lambda own: [own], sharded=False)):
        assert by_rows(torch.clone, torch.arange(2)).tolist() == [0]
    assert by_rows(torch.clone, torch.arange(2)).tolist() == [0, 1]


def test_what_stops_one_process_stops_all() -> None:
    model = successor_model()
    with torch.no_grad():
        model.embedding.weight[1] = torch.nan
    told = scored_together(2, lambda: evaluate(model, Counting(), 2, batches=1), sharded=False)
    assert told[0] == told[1]
    assert "NaN" in told[0]


@pytest.mark.parametrize("score", [evaluate, evaluate_by_position])
@pytest.mark.parametrize(
    ("task", "length", "batches", "message"),
    [
        (Counting(), 4, 0, "batches must be at least 1, got batches=0"),
        (Counting(), 4, -1, "batches must be at least 1, got batches=-1"),
        (Counting(), -1, 4, "length must be at least 1, got length=-1"),
        (Numbers(), 4, -1, "batches must be at least 0, got batches=-1"),
        (Numbers(), 0, 0, "length must be at least 1, got length=0"),
    ],
)
def test_less_than_one_problem_or_token_has_no_score(
    score: Callable[..., Any], task: Any, length: int, batches: int, message: str
) -> None:
    task.train_length = 8
    with pytest.raises(InputError, match=message):
        score(successor_model(), task, length, batches=batches)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([TOKENS[None]], r"shape \(length\), got torch.int64 of \(1, 150\)"),
        (TOKENS, r"shape \(length\), got torch.int64 of \(\)"),
        ([[1, 2, 3]], r"shape \(length\), got list"),
        ([TOKENS.to(torch.uint8)], "int64 or int32, got torch.uint8"),
    ],
)
def test_pieces_that_are_no_texts_are_refused(
    pieces: Any, message: str, window: int | None
) -> None:
    with pytest.raises(InputError, match=message):
        score_text(text_model("lstm"), pieces, window=window)


def test_bits_per_byte_need_bytes() -> None:
    score = score_text(text_model("lstm"), [TOKENS])
    with pytest.raises(InputError, match="score_text does not count: take score_file"):
        score.bits_per_byte  # noqa: B018
