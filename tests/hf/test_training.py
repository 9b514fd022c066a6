"""Trainer and PEFT train our models as our own loop does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.optimizer import learning_rate_share, make_optimizer, parameter_groups
from tests.hf.conftest import Make, hf

pytestmark = pytest.mark.filterwarnings("default")

STEPS = 50
TASK = "copying(max_len=8, batch_size=4)"


def arguments(folder: Path, **settings: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(str(folder), **{**given, **settings})


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def rows(count: int, pad: int = 0) -> list[dict[str, Tensor]]:
    """Texts of random tokens, some of them padded on the left; first tokens are no targets.

    Trainer divides by the number of labels, so it must not count the first token after padding.
    """
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        ids = torch.randint(1, 61, (12,), generator=draw)
        mask = torch.arange(12) >= (pad if number % 2 else 0)
        start = int(mask.long().argmax())
        labels = ids.masked_fill(torch.arange(12) <= start, -100)
        made.append({"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels})
    return made


def shifted(tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """A row of ours for Trainer, which shifts the labels itself."""
    last = targets[-1:].clamp(min=0)
    nothing = torch.tensor([-100])
    return {"input_ids": torch.cat([tokens, last]), "labels": torch.cat([nothing, targets])}


def test_fifty_steps_of_trainer_have_the_losses_of_our_loop(tmp_path: Path) -> None:
    from transformers import Trainer

    config = TrainConfig(steps=STEPS, lr=1e-2, warmup_steps=5, log_every=1, save_every=0)
    task = make_task(TASK, seed=0)
    batches = [task.train_batch(step) for step in range(STEPS)]

    def new() -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(ModelConfig("h3 attention", task.vocab_size, 32))

    wanted = [metrics.loss for metrics in train(new(), task, config).curve]
    wrapped = hf.wrap(new())
    optimizer = make_optimizer(wrapped, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_share(config, min(step, STEPS - 1))
    )
    data = [shifted(*row) for batch in batches for row in zip(*batch, strict=True)]
    trainer = Trainer(
        wrapped,
        arguments(tmp_path, max_grad_norm=config.clip),
        train_dataset=data,
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    assert losses(trainer) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("adapted", [False, True])
def test_trainer_decays_what_our_loop_decays(tmp_path: Path, adapted: bool) -> None:
    from transformers import Trainer

    class GroupedTrainer(hf.OptimizerGroups, Trainer):
        pass

    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("mamba h3 rg_lru rwkv7", 16, 32))
    wrapped: Any = hf.wrap(model)
    if adapted:
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(wrapped, peft.LoraConfig(target_modules="all-linear"))
    wanted = {p for g in parameter_groups(model, TrainConfig()) for p in g["params"] if decayed(g)}
    given = arguments(tmp_path, weight_decay=0.1, learning_rate=1e-2)
    optimizer = GroupedTrainer(wrapped, given).create_optimizer()
    trained = {p: g for g in optimizer.param_groups for p in g["params"]}
    assert trained.keys() == {p for p in wrapped.parameters() if p.requires_grad}
    assert {p for p, g in trained.items() if decayed(g)} == {
        p for p in trained if p in wanted or adapted
    }
    assert {g["lr"] for g in optimizer.param_groups} == ({1e-2} if adapted else {1e-2, 1e-3})


def decayed(group: dict[str, Any]) -> bool:
    return group["weight_decay"] > 0


def test_checkpoints_of_activations_are_switched_on_and_off(make: Make) -> None:
    wrapped = hf.wrap(make("h3"))
    wrapped.gradient_checkpointing_enable()
    assert wrapped.model.stack.checkpoints_activations
    wrapped.gradient_checkpointing_disable()
    assert not wrapped.model.stack.checkpoints_activations


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}])
def test_trainer_has_the_losses_of_each_row_alone_and_resumes(
    make: Make, tmp_path: Path, settings: dict[str, Any]
) -> None:
    from transformers import Trainer

    data = rows(16, pad=5)
    first = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, **settings)
    whole = Trainer(hf.wrap(make().train()), first, train_dataset=data)
    whole.train()
    model = make()
    scored = [nn_loss(model, row) for row in data[:4]]
    wanted = sum(total for total, _ in scored) / sum(count for _, count in scored)
    assert losses(whole)[0] == pytest.approx(wanted, rel=1e-3)
    resumed = Trainer(hf.wrap(make().train()), first, train_dataset=data)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "borders", [{"position_ids": [0, 1, 2, 3, 0, 1]}, {"seq_idx": [0] * 4 + [1] * 2}]
)
def test_trainer_keeps_the_columns_that_say_where_texts_begin(
    make: Make, tmp_path: Path, borders: dict[str, list[int]]
) -> None:
    from transformers import Trainer

    texts = [row["input_ids"][:6] for row in rows(4)]
    begins = torch.tensor([1, 0, 0, 0, 1, 0]).bool()
    data = [{"input_ids": ids, "labels": ids.masked_fill(begins, -100), **borders} for ids in texts]
    trainer = Trainer(hf.wrap(make().train()), arguments(tmp_path, max_steps=1), train_dataset=data)
    trainer.train()
    alone = [part for ids in texts for part in ids.split([4, 2])]
    scored = [nn_loss(make(), {"input_ids": ids, "attention_mask": ids > 0}) for ids in alone]
    wanted = sum(total for total, _ in scored) / sum(count for _, count in scored)
    assert losses(trainer) == pytest.approx([wanted], rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
def test_the_first_token_after_padding_has_no_loss(make: Make, use_cache: bool) -> None:
    model, batch = make(), {name: rows(2, pad=5)[1][name][None] for name in rows(1)[0]}
    real = batch["attention_mask"].bool()
    batch["labels"] = batch["input_ids"].masked_fill(~real, -100)
    total, count = nn_loss(model, {name: tensor[0] for name, tensor in batch.items()})
    found = hf.wrap(model)(**batch, use_cache=use_cache).loss
    assert float(found) == pytest.approx(total / count, rel=1e-4)


@torch.no_grad()
def nn_loss(model: LanguageModel, row: dict[str, Tensor]) -> tuple[float, int]:
    tokens = row["input_ids"][row["attention_mask"].bool()][None]
    logits = model(tokens)[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
    return float(loss), tokens.shape[1] - 1


def adapted(model: LanguageModel, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    return get_peft_model(hf.wrap(model), config)


@torch.no_grad()
@pytest.mark.parametrize(
    "pattern", ["h3 attention(position=rope)", "mamba mamba2", "gated_delta_net"]
)
def test_low_rank_adapters_obey_the_law_reload_and_merge(
    make: Make, tmp_path: Path, pattern: str
) -> None:
    from peft import PeftModel

    tokens = make(pattern).example_input(2, 9)
    model = adapted(make(pattern), init_lora_weights=False).eval()
    wanted = model(input_ids=tokens, use_cache=False).logits
    assert (wanted - make(pattern)(tokens)).abs().max() > 0.1
    scale = wanted.abs().max().item()
    close = {"rtol": 1e-4, "atol": 1e-4 * scale}
    torch.testing.assert_close(model(input_ids=tokens).logits, wanted, **close)
    inner = model.base_model.model.model
    state, steps = inner.init_state(2), []
    for token in tokens.T:
        logits, state = inner.step(token, state)
        steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, dim=1), wanted, **close)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(hf.wrap(make(pattern)), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=tokens, use_cache=False).logits, wanted, **close)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens, use_cache=False).logits, wanted, **close)


def test_low_rank_adapters_train_and_nothing_else_changes(make: Make, tmp_path: Path) -> None:
    from transformers import Trainer

    model = adapted(make("h3 attention"))
    data = rows(4) * 20
    settings = {"max_steps": 20, "learning_rate": 1e-2, "gradient_checkpointing": True}
    trainer = Trainer(model, arguments(tmp_path, **settings), train_dataset=data)
    trainer.train()
    assert losses(trainer)[-1] < 0.9 * losses(trainer)[0]
    before = dict(make("h3 attention").named_parameters())
    after = {
        name.removeprefix("base_model.model.model.").replace(".base_layer", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
