"""Training with a teacher: its losses, what they train, and weights that are frozen."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.cli import main
from stateline.errors import InputError
from stateline.models.checkpoint import load_any, save_model
from stateline.models.language_model import LanguageModel
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.distillation import Distillation, distance, logits_loss, matrix_distance
from stateline.train.loop import train

TASK = "copying(max_len=5, batch_size=4)"
OLD, NEW = "attention attention", "attention h3"
HEADS = "attention gated_delta_net(n_heads=4, expand_v=1)"
KEPT = (
    "attention parallel(attention(n_heads=2, n_kv_heads=2, d_head=4), "
    'gated_delta_net(n_heads=2, d_key=4), keeps="0 2")'
)
FAST = {"steps": 3, "warmup_steps": 0, "lr": 1e-2, "eval_every": 0}


def model(pattern: str = OLD, seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(make_task(TASK).model_config(pattern, {"d_model": 16}))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    save_model(model(), tmp_path / "teacher")
    return str(tmp_path / "teacher")


def batch() -> Any:
    return make_task(TASK).train_batch(0)


def test_logits_are_compared_by_the_divergence_of_tempered_distributions() -> None:
    z, t = torch.randn(2, 5, 7, dtype=torch.float64)
    own, its = (z / 2).softmax(-1), (t / 2).softmax(-1)
    torch.testing.assert_close(logits_loss(z, t, 2), 4 * (its * (its / own).log()).sum(-1))
    cross = -(t.softmax(-1) * z.log_softmax(-1)).sum(-1)
    entropy = -(t.softmax(-1) * t.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(logits_loss(z, t), cross - entropy)


def test_outputs_are_compared_by_the_mean_norm_of_the_difference() -> None:
    a, b = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    wanted = torch.stack(
        [(x - y).square().sum().sqrt() for x, y in zip(a.view(-1, 8), b.view(-1, 8), strict=True)]
    )
    torch.testing.assert_close(distance(a, b), wanted.mean())


@pytest.mark.parametrize("loss", [distance, matrix_distance])
def test_a_distance_in_bfloat16_is_summed_in_float32(loss: Callable[[Any, Any], Any]) -> None:
    a, b = torch.randn(2, 2, 64, 8, 8).bfloat16()
    torch.testing.assert_close(loss(a, b), loss((a - b).float(), torch.zeros(1)))


MATCHES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "outputs": lambda s, t, x: distance(s[2].layer(t[2].norm(x[2])), t[2].layer(t[2].norm(x[2]))),
    "squares": lambda s, t, x: (
        1000 * F.mse_loss(s[2].layer(t[2].norm(x[2])), t[2].layer(t[2].norm(x[2])))
    ),
    "blocks": lambda s, _, x: distance(s[3](s[2](x[2])), x[4]),
}


@pytest.mark.parametrize("match", MATCHES)
def test_layers_are_compared_on_the_inputs_of_the_teacher(match: str) -> None:
    teacher, student = model().eval(), model(NEW, seed=1).eval()
    loss = Distillation(teacher, TrainConfig(teacher="it", match=match))
    tokens, targets = batch()
    with torch.no_grad():
        found = loss(student, tokens, targets)
        links = (each.stack.links for each in (student, teacher))
        wanted = MATCHES[match](*links, teacher.hidden_states(tokens))
    torch.testing.assert_close(found, wanted * (targets >= 0).sum())


@pytest.mark.parametrize(("pattern", "heads"), [(HEADS, [0, 1, 2, 3]), (KEPT, [1, 3])])
def test_the_weights_of_values_are_compared_in_the_heads_that_are_replaced(
    pattern: str, heads: list[int]
) -> None:
    teacher, student = model().eval(), model(pattern, seed=1).eval()
    loss = Distillation(teacher, TrainConfig(teacher="it", match="mixing"))
    tokens, targets = batch()
    layer = student.stack.links[2].layer
    with torch.no_grad():
        x = teacher.stack.links[2].norm(teacher.hidden_states(tokens)[2])
        recurrence = layer if pattern == HEADS else layer.links[1]
        difference = recurrence.mixing(x) - teacher.stack.links[2].layer.mixing(x)[:, heads]
        wanted = difference.square().sum((2, 3)).sqrt().mean()
        found = loss(student, tokens, targets)
    torch.testing.assert_close(found, wanted * (targets >= 0).sum())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (NEW, "needs layers whose heads sum values with weights, got H3"),
        ("attention gated_delta_net(n_heads=2)", "a new layer has 2 for 4; give it as many"),
    ],
)
def test_layers_without_such_weights_are_refused(pattern: str, message: str) -> None:
    loss = Distillation(model(), TrainConfig(teacher="it", match="mixing"))
    with pytest.raises(InputError, match=message):
        loss(model(pattern), *batch())


@pytest.mark.parametrize("match", ["logits", "outputs", "blocks"])
def test_what_a_teacher_gave_is_read_from_the_disk(
    match: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    config = TrainConfig(**FAST, teacher=folder, match=match, teacher_outputs=str(kept))
    first, second = (model(NEW, seed=1) for _ in range(2))
    train(first, make_task(TASK), config)
    files = sorted(kept.glob("*.safetensors"))
    assert len(files) == FAST["steps"]
    monkeypatch.setattr("stateline.models.language_model.LanguageModel.streams", None)
    whole = LanguageModel.forward
    monkeypatch.setattr(
        LanguageModel, "forward", lambda it, x, **more: whole(it, x, **more) if it.training else 0
    )
    train(second, make_task(TASK), config)
    assert all(weight.equal(second.state_dict()[n]) for n, weight in first.state_dict().items())
    files[0].write_bytes(b"{")
    with pytest.raises(InputError, match=r"is damaged: .*; remove it"):
        train(model(NEW, seed=1), make_task(TASK), config)


def tensor_bytes(known: set[int]) -> tuple[set[int], int]:
    """The storages of all tensors, and the bytes of those that were not known before."""
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return {*sizes}, sum(size for place, size in sizes.items() if place not in known)


def test_a_layer_alone_needs_the_teacher_and_its_own_gradients_and_moments(tmp_path: Path) -> None:
    task, sizes = make_task(TASK), {"d_model": 96}
    teacher, student = (LanguageModel(task.model_config(p, sizes)) for p in (OLD, "h3 h3"))
    save_model(teacher, tmp_path / "teacher")
    replaced = ("stack.layers.0.layer.", "stack.layers.2.layer.")
    kept = {n: w for n, w in teacher.state_dict().items() if not n.startswith(replaced)}
    student.load_state_dict(kept, strict=False)
    del kept
    whole = sum(weight.nbytes for weight in teacher.parameters())
    new, other = (
        sum(weight.nbytes for weight in student.stack.links[n].layer.parameters()) for n in (0, 2)
    )
    del teacher
    gc.collect()
    own = sum(weight.nbytes for weight in student.parameters())
    known, _ = tensor_bytes(set())
    seen = list[int]()
    config = TrainConfig(
        **FAST, teacher=str(tmp_path / "teacher"), match="outputs", freeze="stack.layers.2.*"
    )
    train(student, task, config, interrupted=lambda: bool(seen.append(tensor_bytes(known)[1])))
    rows = 1 << 18  # a batch, its streams and the buffers of one call
    assert max(seen) + own <= whole + new + other + 3 * new + rows
    assert whole > 2 * rows  # or nothing would be shown


def test_a_student_that_is_its_teacher_loses_nothing() -> None:
    teacher = model().eval()
    loss = Distillation(teacher, TrainConfig(teacher="it"))
    assert loss(model().eval(), *batch()).abs() < 1e-5
    assert loss(model(seed=1).eval(), *batch()) > 0.1


@pytest.mark.parametrize("match", ["logits", *MATCHES])
def test_the_loss_falls_and_only_layers_that_it_compares_are_trained(
    match: str, folder: str
) -> None:
    student = model(NEW, seed=1)
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    config = TrainConfig(**{**FAST, "steps": 12, "log_every": 1}, teacher=folder, match=match)
    curve = train(student, make_task(TASK), config).curve
    assert curve[-1].loss < curve[0].loss
    changed = {
        name for name, weight in student.state_dict().items() if not weight.equal(before[name])
    }
    beginnings = {"outputs": "stack.layers.2.layer.", "squares": "stack.layers.2.layer."}
    beginnings |= {"blocks": "stack.layers.", "logits": ""}
    assert all(name.startswith(beginnings[match]) for name in changed)
    assert any(name.startswith("stack.layers.2.layer.") for name in changed)
    assert ("stack.layers.3.layer.out_proj.weight" in changed) == (match in ("blocks", "logits"))
    assert not any(name.startswith("stack.layers.0") for name in changed) or match == "logits"
    assert all(weight.requires_grad for weight in student.parameters())


def test_frozen_weights_stay(folder: str) -> None:
    student = model(NEW, seed=1)
    before = student.stack.links[2].layer.qkv.weight.clone(), student.embedding.weight.clone()
    train(student, make_task(TASK), TrainConfig(**FAST, freeze="embedding.* *.2.layer.qkv.*"))
    assert student.stack.links[2].layer.qkv.weight.equal(before[0])
    assert student.embedding.weight.equal(before[1])
    assert not student.norm.weight.equal(torch.ones(16))
    with pytest.raises(InputError, match="freeze='nothing' fits no weight: names are such as emb"):
        train(student, make_task(TASK), TrainConfig(**FAST, freeze="nothing"))


def test_layers_are_trained_in_turn_when_the_others_are_frozen(folder: str) -> None:
    student = model("h3 h3", seed=1)
    config = TrainConfig(**FAST, teacher=folder, match="outputs", freeze="stack.layers.2.*")
    first, other = (student.stack.links[n].layer.out_proj.weight.clone() for n in (0, 2))
    train(student, make_task(TASK), config)
    assert not student.stack.links[0].layer.out_proj.weight.equal(first)
    assert student.stack.links[2].layer.out_proj.weight.equal(other)


def test_a_distillation_that_was_stopped_ends_with_the_same_weights(
    folder: str, tmp_path: Path
) -> None:
    ends = []
    for stop in (False, True):
        student, where = model(NEW, seed=1), tmp_path / f"run{stop}"
        config = TrainConfig(**FAST, teacher=folder, match="outputs")
        if stop:
            train(student, make_task(TASK), config, folder=where, interrupted=lambda: True)
            student = model(NEW, seed=2)
        train(student, make_task(TASK), config, folder=where)
        ends.append(student.state_dict())
    assert all(weight.equal(ends[1][name]) for name, weight in ends[0].items())


@pytest.mark.parametrize(
    ("pattern", "settings", "message"),
    [
        (OLD, {"match": "outputs"}, "got no such layers: take match=logits"),
        ("attention", {"match": "blocks"}, "got no such layers"),
        (NEW, {"match": "outputs", "parallel": "fsdp"}, "which fsdp does not allow"),
    ],
)
def test_what_a_teacher_cannot_teach_is_refused(
    pattern: str, settings: dict[str, Any], message: str, folder: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(model(pattern), make_task(TASK), TrainConfig(**FAST, teacher=folder, **settings))


def test_settings_of_a_teacher_need_one() -> None:
    for settings in ({"match": "outputs"}, {"temperature": 2.0}, {"teacher_outputs": "kept"}):
        with pytest.raises(InputError, match="set teacher, too"):
            TrainConfig(**settings)
    with pytest.raises(InputError, match="wants temperature to be a finite number above 0"):
        TrainConfig(teacher="it", temperature=0.0)
    with pytest.raises(InputError, match="a teacher reads whole rows"):
        TrainConfig(teacher="it", loss_chunk=8)


def test_a_hybrid_is_distilled_from_the_command_line(folder: str, tmp_path: Path) -> None:
    out, then = str(tmp_path / "aligned"), str(tmp_path / "distilled")
    sizes = ["--task", TASK, "--train.steps", "2", "--train.teacher", folder, "--device", "cpu"]
    align = ["--pattern", NEW, "--train.match", "outputs", "--out", out]
    assert main(["train", folder, *align, *sizes]) == 0
    assert main(["train", out, *sizes, "--train.temperature", "2", "--out", then]) == 0
    first, aligned, last = (load_any(Path(f)).state_dict() for f in (folder, out, then))
    name = "stack.layers.0.layer.qkv.weight"
    assert first[name].equal(aligned[name])
    assert not aligned[name].equal(last[name])
