"""Layers that replace others in a trained model begin with the outputs of those."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import RWKV7, Attention, GatedDeltaNet, KimiDeltaAttention, SlidingAttention
from stateline.layers.mixers.heads import Offset, Rms, Rope
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.starts import RIDGES, best_map, fit_outputs, replaced, take_heads
from stateline.probe.network import StatelineNetwork, silenced

CONFIG = ModelConfig(
    "attention(position=rope)*2", vocab_size=11, d_model=16, layers={"attention": {"n_heads": 4}}
)
TOKENS = torch.randint(11, (6, 40), generator=torch.Generator().manual_seed(0))


def pair(pattern: str, **settings: str) -> tuple[LanguageModel, LanguageModel]:
    """A student and its teacher, which differ in their second mixers alone."""
    torch.manual_seed(0)
    config = replace(CONFIG, **settings)
    teacher = LanguageModel(config).double().eval()
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(torch.randn_like(weight) / 5)
    pattern = f"attention(position=rope) {pattern}"
    student = LanguageModel(replace(config, pattern=pattern)).double().eval()
    weights = teacher.state_dict()
    kept = {n: t for n, t in weights.items() if n in student.state_dict()}
    ours = ("stack.layers.2.layer.", "stack.layers.1.branches.0.layer.")
    kept = {n: t for n, t in kept.items() if not n.startswith(ours)}
    student.load_state_dict(kept, strict=False)
    return student, teacher


def distance(student: LanguageModel, teacher: LanguageModel) -> float:
    with torch.no_grad():
        return F.mse_loss(student(TOKENS), teacher(TOKENS)).item()


KINDS = ["h3", "linear_attention", "mamba2 feed_forward", "gated_delta_net(n_heads=4, expand_v=1)"]
KINDS += ["parallel(attention(n_heads=2, d_head=4, position=rope), rwkv7)"]


@pytest.mark.parametrize("block", ["sequential", "parallel"])
@pytest.mark.parametrize("pattern", KINDS)
def test_a_fitted_layer_begins_better_than_a_new_one_and_than_none(
    pattern: str, block: str
) -> None:
    if block == "parallel" and "feed_forward" in pattern:
        pytest.skip("a parallel block has no feed-forward of its own")
    student, teacher = pair(pattern, block=block)
    fresh = distance(student, teacher)
    layer = list(replaced(student, teacher))[-1][1].layer
    lasts = [part.out_proj for part in layer.modules() if getattr(part, "out_proj", None)]
    kept = [last.weight.detach().clone() for last in lasts]
    for last in lasts:
        torch.nn.init.zeros_(last.weight)
    without = distance(student, teacher)
    with torch.no_grad():
        for last, weight in zip(lasts, kept, strict=True):
            last.weight.copy_(weight)
    take_heads(student, teacher)
    fit_outputs(student, teacher, [TOKENS])
    assert distance(student, teacher) < min(fresh, without)


def test_the_fit_is_the_ridge_regression_of_the_old_outputs() -> None:
    student, teacher = pair(["lstm", "h3"][1])
    block, old = student.stack.links[2], teacher.stack.links[2]
    fit_outputs(student, teacher, [TOKENS])
    features: list[Tensor] = []
    hook = block.layer.out_proj.register_forward_pre_hook(lambda _, x: features.append(x[0]))
    with torch.no_grad():
        x = old.norm(teacher.hidden_states(TOKENS)[2])
        block.layer(x)
        y = old.layer(x).flatten(0, 1)
    hook.remove()
    f = features[0].flatten(0, 1)

    def ridge(f: Tensor, y: Tensor, size: float) -> Tensor:
        gram = f.T @ f
        size *= gram.diagonal().mean().item()
        return torch.linalg.solve(gram + size * torch.eye(len(gram), dtype=gram.dtype), f.T @ y)

    (f1, f2), (y1, y2) = f.chunk(2), y.chunk(2)
    left_out = [
        (f1 @ ridge(f2, y2, size) - y1).square().sum()
        + (f2 @ ridge(f1, y1, size) - y2).square().sum()
        for size in RIDGES
    ]
    best = min(zip(left_out, RIDGES, strict=True))[1]
    torch.testing.assert_close(block.layer.out_proj.weight, ridge(f, y, best).T)


def test_features_without_use_begin_as_if_the_layer_were_not_there() -> None:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    f, y = draw(2, 40, 30), draw(2, 40, 4)
    assert not best_map([(a.T @ a, a.T @ b) for a, b in zip(f, y, strict=True)]).any()
    useful = best_map([(a.T @ a, a.T @ a[:, :4]) for a in f])
    torch.testing.assert_close(useful, torch.eye(30, 4, dtype=torch.float64), rtol=0, atol=0.02)


def test_layers_that_stay_are_not_changed() -> None:
    student, teacher = pair("h3")
    before = {name: t.clone() for name, t in student.state_dict().items()}
    fit_outputs(student, teacher, [TOKENS])
    after = student.state_dict()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {"stack.layers.2.layer.out_proj.weight"}


def test_keys_that_heads_share_are_given_to_each() -> None:
    torch.manual_seed(0)
    layer = Attention(16, n_heads=4, n_kv_heads=2, gated=True)
    x = torch.randn(1, 3, 16)
    q, k, v, _ = layer._project(x)
    maps = layer.head_maps()
    found = [torch.einsum("hdm,blm->blhd", each, x) for each in maps]
    torch.testing.assert_close(found[0], q)
    for own, shared in zip(found[1:], (k, v), strict=True):
        torch.testing.assert_close(own, shared.repeat_interleave(2, dim=2))


def divided(
    keeps: str, beside: str = "lstm", **settings: str
) -> tuple[LanguageModel, LanguageModel]:
    """A student that keeps some heads beside a recurrence, and its teacher."""
    n = len(keeps.split())
    kept = f"attention(n_heads={n}, d_head=4, n_kv_heads={n}, position=rope)"
    return pair(f'parallel({kept}, {beside}, keeps="{keeps}")')


@pytest.mark.parametrize("keeps", ["3 0 2 1", "1 3", "2"])
def test_a_student_whose_recurrence_is_silent_is_the_teacher_without_the_other_heads(
    keeps: str,
) -> None:
    student, teacher = divided(keeps, "gated_conv")
    take_heads(student, teacher)
    torch.nn.init.zeros_(student.stack.links[2].layer.links[1].out_proj.weight)
    kept = torch.zeros(len(TOKENS), 4)
    kept[:, [int(head) for head in keeps.split()]] = 1
    network = StatelineNetwork(teacher)
    with torch.no_grad(), silenced(network.mixers[2], kept):
        wanted = teacher(TOKENS)
    torch.testing.assert_close(student(TOKENS), wanted, rtol=0, atol=1e-10)
    if len(keeps.split()) == 4:
        torch.testing.assert_close(student(TOKENS), teacher(TOKENS), rtol=0, atol=1e-10)


def test_heads_that_stay_are_not_fitted_and_the_others_are_given_away() -> None:
    beside = "gated_delta_net(n_heads=2, d_key=4, expand_v=1)"
    student, teacher = divided("3 1", beside)
    take_heads(student, teacher)
    attention, recurrence = student.stack.links[2].layer.links
    before = attention.out_proj.weight.clone(), recurrence.out_proj.weight.clone()
    fit_outputs(student, teacher, [TOKENS])
    assert attention.out_proj.weight.equal(before[0])
    assert not recurrence.out_proj.weight.equal(before[1])
    rows = teacher.stack.links[2].layer.qkv.weight.view(3, 4, 4, 16)[:, [0, 2]]
    torch.testing.assert_close(recurrence.in_proj.weight[:24], rows.flatten(0, 2))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Attention, {"qk_norm": Rms(), "gated": True, "bias": "qkv"}),
        (SlidingAttention, {"qk_norm": Offset(), "position": Rope(), "window": 5, "bias": "qkv"}),
        (SlidingAttention, {"qk_norm": True, "position": "t5", "window": 7}),
        (SlidingAttention, {"position": "relative", "window": 4}),
    ],
)
def test_groups_of_heads_that_take_all_heads_are_the_old_layer(
    kind: type[Attention | SlidingAttention], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    old = kind(16, n_heads=4, n_kv_heads=2, **settings).double()
    for weight in old.parameters():
        weight.data += torch.randn_like(weight) / 5
    parts = [kind(16, n_heads=2, n_kv_heads=2, d_head=4, **settings).double() for _ in range(2)]
    x, other = torch.randn(2, 9, 16, dtype=torch.float64), kind(16, n_heads=2, d_head=8)
    for part, heads in zip(parts, ([3, 0], [1, 2]), strict=True):
        assert part.can_be_part_of(old)
        part.take_heads(old, heads)
    torch.testing.assert_close(parts[0](x) + parts[1](x), old(x))
    assert not other.can_be_part_of(old)


def test_layers_that_mix_by_other_weights_than_softmax_are_replaced() -> None:
    student, teacher = pair("retention(n_heads=4, expand_v=1)")
    assert len([*replaced(student, teacher)]) == 1
    assert not [*replaced(*pair("sliding_attention(n_heads=4, window=3)"))]


def test_heads_that_the_old_layer_does_not_have_are_refused() -> None:
    for keeps, options in (("1 4", ""), ("1 2", ", bias=true"), ("1 2", "(base=7)")):
        kept = f"attention(n_heads=2, d_head=4, position=rope{options})"
        with pytest.raises(
            InputError, match=r"must have as many, of the same width, .* n_kv_heads=2"
        ):
            take_heads(*pair(f'parallel({kept}, lstm, keeps="{keeps}")'))
    for keeps in ("1 1", "a", "-1"):
        with pytest.raises(InputError, match="keeps must be different numbers"):
            pair(f'parallel(lstm, s4d, keeps="{keeps}")')


@pytest.mark.parametrize("kind", [GatedDeltaNet, KimiDeltaAttention])
def test_a_delta_rule_begins_with_queries_keys_and_values(kind: type) -> None:
    torch.manual_seed(0)
    attention = Attention(16, n_heads=2)
    options = {"expand_v": 1} if kind is GatedDeltaNet else {}
    layer, other = kind(16, n_heads=2, **options), kind(16, n_heads=4, **options)
    assert layer.take(attention.head_maps())
    assert not other.take(attention.head_maps())
    x = torch.randn(1, 5, 16)
    mixed, *_ = layer.project(x)
    joint = layer.conv(mixed)
    torch.testing.assert_close(joint, F.silu(attention.qkv(x)))


def test_rwkv7_begins_with_queries_keys_and_values() -> None:
    maps = Attention(16, n_heads=2).head_maps()
    layer = RWKV7(16, n_heads=2)
    assert layer.take(maps)
    assert not RWKV7(16, n_heads=4).take(maps)
    for own, each in zip((layer.r_proj, layer.k_proj, layer.v_proj), maps, strict=True):
        torch.testing.assert_close(own.weight, each.flatten(0, 1))


def test_only_layers_that_take_heads_are_given_them() -> None:
    student, teacher = pair("gated_delta_net(n_heads=4, expand_v=1)")
    take_heads(student, teacher)
    layer, old = (model.stack.links[2].layer for model in (student, teacher))
    torch.testing.assert_close(layer.in_proj.weight[:48], old.qkv.weight)
    student, teacher = pair("h3")
    before = student.stack.links[2].layer.qkv.weight.clone()
    take_heads(student, teacher)
    torch.testing.assert_close(student.stack.links[2].layer.qkv.weight, before)
