import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from stateline.errors import InputError
from stateline.evaluate import losses
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.size import meta_model, training_bytes
from stateline.tasks import Copying, Task, Text
from stateline.train.batches import Batches
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.metrics import METRICS, Metrics, TrainingDiverged, TrainResult
from stateline.train.processes import Processes


def task(seed: int = 0) -> Copying:
    made = Copying(seed, n_letters=2, min_len=2, max_len=2, context_len=7, batch_size=4)
    made.problems_per_batch = 8
    return made


def model(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(ModelConfig("attention(position=rope)", task().vocab_size, 16))


def run(on: Task | None = None, *, of: LanguageModel | None = None, **settings: Any) -> TrainResult:
    defaults = {"steps": 6, "warmup_steps": 0, "eval_every": 0, "log_every": 2}
    config = TrainConfig(**{**defaults, **settings})
    return train(of or model(), on or task(), config)


def test_the_loss_falls() -> None:
    curve = run(steps=60, lr=1e-2, log_every=10).curve
    assert curve[-1].loss < 0.6 * curve[0].loss


def test_a_folder_may_be_a_path_or_its_name(tmp_path: Path) -> None:
    train(model(), task(), TrainConfig(steps=1), folder=str(tmp_path / "run"))
    assert (tmp_path / "run" / METRICS).is_file()


def test_the_loss_is_the_mean_since_the_last_line() -> None:
    single = [metrics.loss for metrics in run(log_every=1).curve]
    pairs = [metrics.loss for metrics in run(log_every=2).curve]
    assert pairs == pytest.approx([sum(single[at : at + 2]) / 2 for at in (0, 2, 4)])


def test_the_first_loss_is_that_of_the_first_batch_under_the_given_weights() -> None:
    tokens, targets = map(torch.as_tensor, task().train_batch(0))
    right = model()(tokens).log_softmax(dim=-1)
    scored = [
        -right[row, place, targets[row, place]].item()
        for row, place in (targets >= 0).nonzero().tolist()
    ]
    assert run(log_every=1).curve[0].loss == pytest.approx(sum(scored) / len(scored), rel=1e-5)


@pytest.mark.cpu
def test_every_update_reads_the_batches_after_those_of_the_update_before() -> None:
    batches = Batches(task(), TrainConfig(steps=3, warmup_steps=0, accumulate=2), Processes())
    read = [micro.tokens for step in range(3) for micro in batches.update(step)]
    assert len(read) == 6
    for index, tokens in enumerate(read):
        assert tokens.equal(torch.as_tensor(task().train_batch(index)[0]))


def weights(of: LanguageModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in of.parameters()])


def test_updates_are_those_of_adamw() -> None:
    ours, by_hand = model(), model()
    settings = {"clip": 0.0, "weight_decay": 0.0, "schedule": "constant", "lr": 1e-2}
    run(of=ours, steps=5, **settings)
    adamw = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(5):
        tokens, targets = map(torch.as_tensor, task().train_batch(step))
        adamw.zero_grad()
        cross_entropy(by_hand(tokens).mT, targets, ignore_index=-100).backward()
        adamw.step()
    torch.testing.assert_close(weights(ours), weights(by_hand), rtol=1e-4, atol=1e-5)


def test_a_seed_fixes_the_weights_to_the_bit() -> None:
    first, again, other = (model(seed) for seed in (0, 0, 1))
    for made in (first, again, other):
        run(of=made)
    assert weights(first).equal(weights(again))
    assert not weights(first).equal(weights(other))


def test_the_data_of_another_seed_give_other_weights() -> None:
    made = [model(), model()]
    run(task(0), of=made[0])
    run(task(1), of=made[1])
    assert not weights(made[0]).equal(weights(made[1]))


def test_scores_do_not_change_the_weights() -> None:
    often, never = model(), model()
    run(of=often, eval_every=1)
    run(of=never, eval_every=0)
    assert weights(often).equal(weights(never))


def test_it_scores_every_so_often_and_at_the_end() -> None:
    curve = run(steps=7, eval_every=3, log_every=2).curve
    assert [(m.step, m.metric is not None) for m in curve] == [
        *[(2, False), (3, True), (4, False), (6, True)],
        (7, True),
    ]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("carried", [{}, {"carry_state": True, "segment_len": 20}])
def test_a_loss_by_chunks_is_the_loss(
    tmp_path: Path, precision: str, carried: dict[str, Any]
) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 64)
    text = Text(path=str(tmp_path / "text.txt"), length=30, batch_size=4)
    settings = {"precision": precision, "log_every": 1, **carried}
    made = []
    for chunk in (None, 13, 10**6):
        torch.manual_seed(0)
        model = LanguageModel(
            ModelConfig("lstm", 256, d_model=8, tie_embeddings=False, head_bias=True)
        )
        curve = run(text, of=model, loss_chunk=chunk, **settings).curve
        made.append([(point.loss, point.gradient_norm) for point in curve])
    limit = 1e-5 if precision == "float32" else 1e-3
    for whole, *others in zip(*made, strict=True):
        for other in others:
            assert other == pytest.approx(whole, rel=limit)


def _peak(folder: Path, **settings: Any) -> tuple[LanguageModel, int]:
    """A model with 256 tokens, and the most bytes that its training took."""
    (folder / "text.txt").write_bytes(bytes(range(256)) * 64)
    text = Text(path=str(folder / "text.txt"), length=1024, batch_size=4)
    model = LanguageModel(ModelConfig("lstm", 256, d_model=4, feed_forward="none"))
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiled:
        run(text, of=model, steps=1, **settings)
    taken, most = 0, 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return model, most


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_memory_of_logits_is_foretold(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_LOGITS", 2**18)  # so scores need less than training
    model, whole = _peak(tmp_path, precision=precision)
    foretold = training_bytes(meta_model(model.config), 4, 1024)
    assert whole == pytest.approx(foretold["logits"] + foretold["activations"], rel=0.2)
    _, by_chunks = _peak(tmp_path, precision=precision, loss_chunk=1024)
    less = training_bytes(meta_model(model.config), 4, 1024, loss_chunk=1024)
    assert whole - by_chunks == pytest.approx(foretold["logits"] - less["logits"], rel=0.1)


def largest_gradients(monkeypatch: pytest.MonkeyPatch, clip: float) -> list[float]:
    """Norm of the whole gradient at every update."""
    norms: list[float] = []
    update = torch.optim.AdamW.step

    def watched(optimizer: torch.optim.AdamW) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        update(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run(clip=clip)
    return norms


def test_a_line_has_the_norm_of_the_last_gradient_before_clipping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *_ = largest_gradients(monkeypatch, 0.0)
    found = run(log_every=1, clip=0.01, lr=1e-9).curve
    assert [line.gradient_norm for line in found][:1] == [pytest.approx(first, rel=1e-5)]
    assert min(line.gradient_norm or 0 for line in found) > 0.1


def test_clipping_bounds_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest_gradients(monkeypatch, 0.01) == pytest.approx([0.01] * 6, rel=1e-3)


def test_without_clipping_the_gradient_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(largest_gradients(monkeypatch, 0.0)) > 0.1


@pytest.mark.cpu
def test_a_loss_that_is_no_number_is_named_with_its_step() -> None:
    with pytest.raises(TrainingDiverged, match="the loss became nan at step 2: lower lr") as c:
        run(lr=1e38, clip=0.0)
    assert c.value.steps == 1


def test_a_gradient_that_is_no_number_is_named_and_changes_no_weight() -> None:
    trained = model()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    next(trained.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    config = TrainConfig(steps=2, warmup_steps=0, eval_every=0)
    with pytest.raises(TrainingDiverged, match=r"the gradient became (nan|inf) at step 1: lower"):
        train(trained, task(), config)
    assert all(map(torch.equal, trained.parameters(), before))


@pytest.mark.cpu
def test_an_update_is_judged_as_a_whole_and_not_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, after = list[torch.Tensor](), list[int]()
    monkeypatch.setattr("stateline.ops.containment._is_finite", lambda x: not asked.append(x))
    pattern = "attention h3 mamba3 block_recurrent(window=4, n_states=4)"
    own = LanguageModel(ModelConfig(pattern, task().vocab_size, 16))
    config = TrainConfig(steps=2, eval_every=0)
    train(own, task(), config, interrupted=lambda: bool(after.append(len(asked))))
    assert after[0] == 0
    own(torch.ones(1, 4, dtype=torch.int64))
    assert len(asked) > after[-1]


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    config = TrainConfig(steps=2, lr=1e39, clip=0.0, warmup_steps=0, eval_every=0, save_every=1)
    said = "a weight or its moments became infinite or NaN at step 1: lower lr"
    with pytest.raises(TrainingDiverged, match=said):
        train(model(), task(), config, folder=tmp_path)
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.cpu
def test_an_output_that_is_no_number_is_named_with_the_step_of_the_score() -> None:
    with pytest.raises(TrainingDiverged, match="the output became NaN at step 1: lower lr") as c:
        run(lr=1e38, clip=0.0, steps=1)
    assert c.value.steps == 0


def test_it_stops_when_the_score_is_as_good_as_asked() -> None:
    result = run(eval_every=2, stop_at=0.0)
    assert (result.stopped, result.steps, result.curve[-1].steps) == ("solved", 2, 6)


def test_it_goes_on_while_the_score_is_worse_than_asked() -> None:
    result = run(eval_every=2, stop_at=1.1)
    assert (result.stopped, result.steps) == ("finished", 6)


@pytest.mark.parametrize(("stop_at", "steps"), [(100.0, 2), (0.01, 6)])
def test_of_a_score_that_should_be_low_less_is_good(
    tmp_path: Path, stop_at: float, steps: int
) -> None:
    (tmp_path / "text").write_text("abcdefgh" * 20)
    text = Text(path=str(tmp_path / "text"), length=8, batch_size=2)
    made = LanguageModel(ModelConfig("s4d", text.vocab_size, 8))
    assert run(text, of=made, eval_every=2, stop_at=stop_at).steps == steps


def scored_with(monkeypatch: pytest.MonkeyPatch, *scores: float) -> TrainResult:
    """A run whose scores, every second step, are given."""
    given = iter(scores)
    monkeypatch.setattr(
        "stateline.train.loop.evaluate", lambda *_, **__: {"string_accuracy": next(given)}
    )
    return run(eval_every=2)


def test_steps_to_solve_is_when_the_score_was_first_good_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert task().solved_at == 0.95
    assert scored_with(monkeypatch, 0.9, 0.95, 0.99).steps_to_solve == 4


def test_what_is_never_solved_has_no_steps_to_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored_with(monkeypatch, 0.9, 0.94, 0.3).steps_to_solve is None


def test_every_line_of_the_log_is_a_point_of_the_curve(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", list[Metrics]()
    config = TrainConfig(steps=5, log_every=2, eval_every=4, warmup_steps=2)
    result = train(model(), task(), config, folder=folder, on_log=seen.append)
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert lines == [asdict(metrics) for metrics in result.curve] == [asdict(m) for m in seen]
    assert [line["step"] for line in lines] == [2, 4, 5]


def test_a_log_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    log_file = tmp_path / METRICS
    log_file.write_text("old\n")
    train(model(), task(), TrainConfig(steps=1), folder=tmp_path)
    assert len(log_file.read_text().splitlines()) == 1
    assert "old" not in log_file.read_text()


def test_the_log_tells_rates_and_what_is_left() -> None:
    first, second = run(steps=4, schedule="constant", lr=1e-3).curve
    assert first.lr == 1e-3
    assert 0 < first.tokens_per_second < math.inf
    assert first.seconds_left > second.seconds_left == 0


def test_tokens_and_steps_are_counted() -> None:
    result = run(steps=5)
    assert (result.steps, result.tokens) == (5, 5 * task().train_batch(0).tokens.numel())
    assert result.seconds > 0


def test_compiling_in_the_first_update_is_no_training_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updates take 31, 1, 1 and 2 s: the first one compiles for 30 s."""
    ticks = iter([0.0, 31.0, 31.0, 32.0, 32.0, 33.0, 33.0, 35.0])
    clock = SimpleNamespace(perf_counter=ticks.__next__)
    monkeypatch.setattr("stateline.train.loop.time", clock)
    result = run(steps=4, log_every=2)
    assert (result.seconds, result.compile_seconds) == (5.0, 30.0)
    tokens = result.tokens / 4
    assert [line.tokens_per_second for line in result.curve] == [tokens / 16, 2 * tokens / 3]


def test_a_trained_model_is_in_evaluation_mode() -> None:
    made = model()
    run(of=made)
    assert not made.training


def test_a_log_that_cannot_be_written_is_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = model()
    before = weights(made).clone()
    with pytest.raises(InputError, match=r"cannot write .*metrics\.jsonl: "):
        train(made, task(), TrainConfig(steps=1), folder=tmp_path / "file")
    assert weights(made).equal(before)


def test_a_log_that_finds_no_room_is_a_mistake_of_one_line(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    with full_disk(10), pytest.raises(InputError, match=r"cannot write .*: File too large"):
        train(model(), task(), TrainConfig(steps=1), folder=tmp_path)


def test_a_model_of_frozen_weights_is_refused() -> None:
    with pytest.raises(InputError, match="all weights frozen: set requires_grad of some to true"):
        run(of=model().requires_grad_(False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"float32 weights, .* convert .* model.float\(\)"):
        run(of=model().to(dtype))


def test_a_language_model_that_sees_what_follows_is_refused() -> None:
    seeing = LanguageModel(ModelConfig("bidirectional(h3)", task().vocab_size, d_model=8))
    with pytest.raises(InputError, match="the prediction of what follows needs causal layers"):
        run(of=seeing)
