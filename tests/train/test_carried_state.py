"""Training on consecutive segments: what is carried, what is cut, what begins anew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.layers.compose import checkpoint_activations
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Copying, Text
from stateline.train import update
from stateline.train.batches import Batches, MicroBatch, positions_after
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.processes import Processes

MIXED = "h3 attention(position=rope) lstm ladder(s4d, passes=2)"

FROZEN = 1e-30
"""A learning rate at which no weight changes."""


def build(pattern: str = MIXED, d_model: int = 8) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, vocab_size=256, d_model=d_model))


def carried(**settings: Any) -> TrainConfig:
    defaults = {"steps": 6, "warmup_steps": 0, "eval_every": 0, "log_every": 1, "lr": 1e-2}
    defaults |= {"carry_state": True, "carry_cap": 48}
    return TrainConfig(**{**defaults, **settings})


def losses(model: LanguageModel, task: Text, config: TrainConfig) -> list[float]:
    return [metrics.loss for metrics in train(model, task, config).curve]


def rows(task: Text, batches: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the first batches of consecutive text, row by row."""
    parts = [task.consecutive_batch(index) for index in range(batches)]
    joined = (torch.cat([p[part] for p in parts], dim=1) for part in (0, 1))
    tokens, targets = map(torch.as_tensor, joined)
    return tokens, targets


def mean_loss(logits: Tensor, targets: Tensor) -> float:
    return cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def test_a_carried_state_gives_the_loss_of_the_whole_text(text: Text) -> None:
    model = build()
    tokens, targets = rows(text, 3)
    whole = model(tokens)
    wanted = [mean_loss(whole[:, i : i + 16], targets[:, i : i + 16]) for i in (0, 16, 32)]
    assert losses(model, text, carried(steps=3, lr=FROZEN)) == pytest.approx(wanted, rel=1e-5)


@pytest.fixture
def packed(tmp_path: Path) -> Text:
    """Documents in rows of 16 tokens."""
    for number, size in enumerate((70, 9, 40, 23, 90, 5, 61, 30) * 3):
        text = bytes(97 + (n * n + number) % 23 for n in range(size))
        (tmp_path / str(number)).write_bytes(text)
    return Text(path=str(tmp_path), length=16, batch_size=2, documents="pack")


def test_a_packed_document_that_goes_on_in_the_next_batch_keeps_its_state(packed: Text) -> None:
    task = packed
    model, batches = build(), [task.consecutive_batch(index) for index in range(4)]
    tokens, targets, starts = (torch.cat(parts, dim=1) for parts in zip(*batches, strict=True))
    assert not starts[:, 16::16].all()  # some go on
    whole = model(torch.as_tensor(tokens), starts=torch.as_tensor(starts))
    cut = [slice(place, place + 16) for place in range(0, 64, 16)]
    targets = torch.as_tensor(targets)
    wanted = [mean_loss(whole[:, part], targets[:, part]) for part in cut]
    found = losses(model, task, carried(steps=4, lr=FROZEN, carry_cap=128))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found != pytest.approx(losses(model, task, carried(steps=4, lr=FROZEN, carry_cap=16)))


def test_without_carrying_every_batch_starts_from_nothing(text: Text) -> None:
    model = build()
    batches = (map(torch.as_tensor, text.train_batch(index)) for index in range(3))
    wanted = [mean_loss(model(tokens), targets) for tokens, targets in batches]
    config = carried(steps=3, lr=FROZEN, carry_state=False, carry_cap=None)
    assert losses(model, text, config) == pytest.approx(wanted, rel=1e-5)


def test_without_carrying_packed_rows_need_no_start_at_their_first_position(
    packed: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = build(), packed.train_batch
    config = carried(steps=3, lr=FROZEN, carry_state=False, carry_cap=None, segment_len=8)
    wanted = losses(model, packed, config)

    def without(index: int) -> Any:
        batch = given(index)
        starts = batch.starts.clone()
        starts[:, 0] = False
        return batch._replace(starts=starts)

    monkeypatch.setattr(packed, "train_batch", without)
    assert losses(model, packed, config) == pytest.approx(wanted, rel=1e-5)


def test_the_cap_starts_a_row_anew(text: Text) -> None:
    model = build()
    tokens, targets = rows(text, 3)
    two, one = model(tokens[:, :32]), model(tokens[:, 32:])
    wanted = [mean_loss(two[:, 16:], targets[:, 16:32]), mean_loss(one, targets[:, 32:])]
    found = losses(model, text, carried(steps=3, lr=FROZEN, carry_cap=32))
    assert found[1:] == pytest.approx(wanted, rel=1e-5)


def test_the_cap_counts_the_tokens_of_segments(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    forward = LanguageModel.forward_chunk

    def note(model: LanguageModel, tokens: Tensor, state: Any) -> Any:
        entered.append(int(state.position.max()))
        return forward(model, tokens, state)

    monkeypatch.setattr(LanguageModel, "forward_chunk", note)
    train(build("h3"), text, carried(steps=3, segment_len=7, carry_cap=30))
    assert entered == [0, 7, 14, 16, 23, 0, 2, 9, 16]  # pieces of 7, 7 and 2


def test_positions_of_packed_rows_count_from_the_last_start() -> None:
    starts = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]).bool()
    fresh = torch.tensor([False, True, True, False])
    micro = MicroBatch(torch.zeros(4, 4), torch.zeros(4, 4), fresh, 0, starts)
    assert positions_after(torch.tensor([5, 5, 5, 5]), micro).tolist() == [9, 4, 2, 1]


@pytest.mark.parametrize("name", ["text", "packed"])
def test_a_process_has_its_rows_of_every_part_of_a_batch(
    name: str, request: pytest.FixtureRequest
) -> None:
    task, config = request.getfixturevalue(name), carried(segment_len=8)
    whole, second = (
        Batches(task, config, processes).update(1)
        for processes in (Processes(), Processes(rank=1, count=2))
    )
    for everything, own in zip(whole, second, strict=True):
        half = task.batch_size // 2
        assert own.scored == half * 8
        for part in ("tokens", "targets", "fresh", "starts"):
            rows = getattr(everything, part)
            assert rows is None or getattr(own, part).equal(rows[half:]), part


def test_a_fresh_row_starts_anew_and_the_others_go_on(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = build(), text.consecutive_batch

    def second_row_is_fresh(index: int) -> Any:
        batch = given(index)
        return batch._replace(fresh=torch.arange(4).cpu() == 1) if index else batch

    monkeypatch.setattr(text, "consecutive_batch", second_row_is_fresh)
    tokens, targets = rows(text, 2)
    logits = model(tokens)[:, 16:].clone()
    logits[1] = model(tokens[1:2, 16:])[0]
    found = losses(model, text, carried(steps=2, lr=FROZEN))
    assert found[1] == pytest.approx(mean_loss(logits, targets[:, 16:]), rel=1e-5)


def first_gradient(
    monkeypatch: pytest.MonkeyPatch, text: Text, **settings: Any
) -> tuple[LanguageModel, Tensor]:
    """Gradient of the first update."""
    model, found = build(), list[Tensor]()

    def note(*_: object) -> None:
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())  # type: ignore[union-attr]

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    train(model, text, carried(steps=1, clip=0.0, **settings))
    return model, found[0]


def gradient_by_hand(model: LanguageModel, text: Text, cut: Callable[[Any], Any]) -> Tensor:
    """The same in two segments of 8 tokens, with ``cut`` between them."""
    model.zero_grad()
    tokens, targets, _ = map(torch.as_tensor, text.consecutive_batch(0))
    first, state = model.forward_chunk(tokens[:, :8], model.init_state(4))
    second, _ = model.forward_chunk(tokens[:, 8:], cut(state))
    logits = torch.cat([first, second], dim=1)
    cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def no_cut(state: Any) -> Any:
    return state


def cut(state: Any) -> Any:
    return pytree.tree_map(Tensor.detach, state)


def test_the_gradient_reaches_through_a_row(monkeypatch: pytest.MonkeyPatch, text: Text) -> None:
    model, found = first_gradient(monkeypatch, text)
    torch.testing.assert_close(found, gradient_by_hand(model, text, no_cut), rtol=1e-4, atol=1e-6)


def test_the_gradient_is_cut_at_the_ends_of_segments(
    monkeypatch: pytest.MonkeyPatch, text: Text
) -> None:
    model, found = first_gradient(monkeypatch, text, segment_len=8)
    wanted = gradient_by_hand(model, text, cut)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    uncut = gradient_by_hand(model, text, no_cut)
    assert (uncut - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_accumulated_batches_are_one_larger_batch(
    monkeypatch: pytest.MonkeyPatch, text: Text
) -> None:
    settings = {"carry_state": False, "carry_cap": None}
    model, found = first_gradient(monkeypatch, text, accumulate=2, **settings)
    model.zero_grad()
    both = [
        torch.as_tensor(torch.cat(parts))
        for parts in zip(text.train_batch(0), text.train_batch(1), strict=True)
    ]
    cross_entropy(model(both[0]).flatten(0, 1), both[1].flatten()).backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_recomputed_activations_give_the_same_weights(text: Text) -> None:
    made = [build(), build()]
    for model, recomputes in zip(made, (False, True), strict=True):
        train(model, text, carried(checkpoint_activations=recomputes, segment_len=5))
    for one, other in zip(*(model.parameters() for model in made), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_recomputing_keeps_less(text: Text) -> None:
    def kept(recomputes: bool) -> int:
        model, sizes = build("h3*4", 64), list[int]()
        checkpoint_activations(model.stack, recomputes)

        def count(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            model(torch.as_tensor(text.train_batch(0).tokens))
        return sum(sizes)

    assert kept(True) < 0.5 * kept(False)


@pytest.mark.parametrize("pattern", ["h3", "s4d", "lstm", "attention(position=alibi)", MIXED])
def test_bfloat16_leaves_weights_and_states_in_float32(
    monkeypatch: pytest.MonkeyPatch, text: Text, pattern: str
) -> None:
    states: list[Any] = []
    monkeypatch.setattr(update, "detach", lambda state: states.append(state) or cut(state))
    model = build(pattern)
    train(model, text, carried(steps=3, precision="bfloat16"))
    tensors = [*model.parameters(), *pytree.tree_leaves(states)]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}


def test_bfloat16_is_close_to_float32(text: Text) -> None:
    single, half = (losses(build(), text, carried(precision=p)) for p in ("float32", "bfloat16"))
    assert half == pytest.approx(single, rel=0.02)
    assert half != single


@pytest.mark.parametrize(
    ("pattern", "settings", "message"),
    [
        ("h3 attention", {"carry_cap": None}, "the state of this model grows with the length"),
        ("h3", {"carry_cap": 15}, "carry_cap must be at least the task's length of 16, got 15"),
    ],
)
def test_what_cannot_be_carried_is_refused(
    text: Text, pattern: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(build(pattern), text, carried(**settings))


def test_generated_tasks_do_not_go_on() -> None:
    with pytest.raises(InputError, match="carry_state needs a task whose batches continue"):
        train(build("h3"), Copying(), carried())


def test_a_cap_without_carrying_is_refused() -> None:
    with pytest.raises(InputError, match="carry_cap limits a carried state"):
        TrainConfig(carry_cap=100)


def test_learned_positions_need_a_cap(text: Text) -> None:
    model = LanguageModel(ModelConfig("h3", vocab_size=256, d_model=8, max_len=40))
    for cap in (None, 41):
        with pytest.raises(InputError, match=f"set carry_cap to at most that, got {cap}"):
            train(model, text, carried(carry_cap=cap))
    assert train(model, text, carried(carry_cap=40)).stopped == "finished"
