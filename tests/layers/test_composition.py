"""Mixtures of experts, layers side by side, and blocks that stand at several depths."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import (
    LSTM,
    S4D,
    Attention,
    MoE,
    Parallel,
    Residual,
    Shared,
    SharedTransformer,
    Stack,
)
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.ops.grouped_linear import grouped_linear

WIDTH = 8
X = torch.randn(3, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_definition(layer: Any, x: Tensor, normalise: bool = True) -> Tensor:
    """Position by position, expert by expert."""
    y = torch.zeros_like(x)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        token = x[tuple(place)]
        p = (layer.router.weight @ token).softmax(0)
        order = p.tolist()
        chosen = sorted(range(layer.experts), key=lambda i, p=order: -p[i])[: layer.top_k]
        total = sum(p[i] for i in chosen) if normalise else 1.0
        for i in chosen:
            gate, h = (layer.in_weight[i] @ token).chunk(2)
            y[tuple(place)] += p[i] / total * (layer.out_weight[i] @ (F.silu(gate) * h))
    return y if layer.always is None else y + layer.always(x)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 1, "shared": 2}, {"experts": 3, "top_k": 3, "normalise": False}]
)
def test_a_mixture_of_experts_is_its_equation(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, d_hidden=6, **options).double().eval()
    wanted = by_definition(layer, X, options.get("normalise", True))
    torch.testing.assert_close(layer(X), wanted, rtol=0, atol=1e-12)


def test_a_mixture_of_experts_is_that_of_qwen3_next() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        shared_expert_intermediate_size=6,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    theirs = Qwen3NextSparseMoeBlock(config).double()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight)
    torch.nn.init.zeros_(theirs.shared_expert.down_proj.weight)
    layer = MoE(WIDTH, experts=4, d_hidden=6).double().eval()
    with torch.no_grad():
        layer.router.weight.copy_(theirs.gate.weight)
        layer.in_weight.copy_(theirs.experts.gate_up_proj)
        layer.out_weight.copy_(theirs.experts.down_proj)
    torch.testing.assert_close(layer(X), theirs(X), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_loss_that_balances_is_added_to_the_gradient_in_training_alone(kind: str) -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, experts=4, d_hidden=6, balance=0.5, scores=kind).double()

    def gradient(layer: MoE) -> Tensor:
        return torch.autograd.grad(layer(X).sum(), layer.router.weight)[0]

    added = gradient(layer) - gradient(layer.eval())
    scores = layer.router(X.flatten(0, 1))
    scores = scores.softmax(-1) if kind == "softmax" else scores.sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    used = F.one_hot(scores.topk(2).indices, 4).double().mean((0, 1))
    loss = 0.5 * 4 * (used * scores.mean(0)).sum()
    wanted = torch.autograd.grad(loss, layer.router.weight)[0]
    torch.testing.assert_close(added, wanted)
    layer.train().positions = 4 * len(scores)
    torch.testing.assert_close(gradient(layer) - gradient(layer.eval()), wanted / 4)


def test_corrections_rise_for_experts_that_are_used_less() -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, experts=4, d_hidden=6, correction=True, correction_rate=0.5).double()
    layer.uses = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    layer(X).sum().backward()
    used = layer.router(X.flatten(0, 1)).topk(2).indices.flatten().bincount(minlength=4).double()
    assert layer.uses.grad is not None
    assert layer.uses.grad.equal(used)
    layer.correct(layer.uses.grad)
    assert layer.correction is not None
    assert layer.correction.equal(0.5 * (used.mean() - used).sign())


def test_groups_of_rows_have_matrices_of_their_own_in_values_and_gradients() -> None:
    x, weight = X.flatten(0, 1)[:9].clone(), torch.randn(4, 5, WIDTH, dtype=torch.float64)
    counts = torch.tensor([2, 0, 6, 1])
    torch.autograd.gradcheck(
        lambda a, b: grouped_linear(a, b, counts),
        (x.requires_grad_(), weight.requires_grad_()),
    )
    wanted = torch.cat([x[:2] @ weight[0].T, x[2:8] @ weight[2].T, x[8:] @ weight[3].T])
    torch.testing.assert_close(grouped_linear(x, weight, counts), wanted)


def test_layers_side_by_side_are_added_or_normalised_and_averaged() -> None:
    torch.manual_seed(0)
    a, b = Attention(WIDTH).double(), LSTM(WIDTH).double()
    torch.testing.assert_close(Parallel(Stack(a, b))(X), a(X) + b(X))
    normed = [F.rms_norm(layer(X), (WIDTH,), eps=1e-6) for layer in (a, b)]
    for join in ("norm", "hymba"):
        mean = Parallel(Stack(a, b), join=join).double()
        with torch.no_grad():
            mean.norms[1].weight.fill_(3.0)
        wanted = (normed[0] + 3 * normed[1]) / 2
        wanted = wanted if mean.out_proj is None else wanted @ mean.out_proj.weight.T
        torch.testing.assert_close(mean(X), wanted)


def test_an_adapter_reads_an_output_with_the_mean_and_deviation_of_the_first() -> None:
    torch.manual_seed(0)
    a, b = LSTM(WIDTH).double(), Attention(WIDTH).double()
    layer = Parallel(Stack(a, b), join="adapter").double()
    first, second = a(X), b(X)
    second = (second - second.mean(-1, keepdim=True)) / second.std(-1, keepdim=True)
    alike = second * first.std(-1, keepdim=True) + first.mean(-1, keepdim=True)
    (adapter,) = layer.adapters
    wanted = (first + alike @ adapter.weight.T + adapter.bias) / 2
    torch.testing.assert_close(layer(X), wanted, atol=1e-4, rtol=1e-4)  # norm_eps


def test_groups_of_heads_side_by_side_are_the_heads_of_one_layer() -> None:
    torch.manual_seed(0)
    whole = Attention(WIDTH, n_heads=4, position="rope").double()
    parts = [Attention(WIDTH, n_heads=2, d_head=2, position="rope").double() for _ in range(2)]
    for part, rows in zip(parts, (slice(0, 4), slice(4, 8)), strict=True):
        qkv = whole.qkv.weight.view(3, WIDTH, WIDTH)[:, rows].flatten(0, 1)
        out = whole.out_proj.weight[:, rows]
        part.load_state_dict({"qkv.weight": qkv, "out_proj.weight": out})
    torch.testing.assert_close(Parallel(Stack(*parts))(X), whole(X))


def test_a_pattern_names_what_stands_side_by_side() -> None:
    stack = build_stack(ModelConfig("parallel(attention, s4d lstm)", 3, d_model=WIDTH))
    first, feed_forward = (link.layer for link in stack.links)
    assert [type(link) for link in first.links] == [Attention, Stack]
    assert type(feed_forward).__name__ == "FeedForward"


def test_a_shared_block_stands_at_several_depths_with_one_set_of_weights() -> None:
    torch.manual_seed(0)
    block, one, other = (kind(WIDTH).double() for kind in (Attention, LSTM, S4D))
    layer = Shared(Stack(block, one, other), rank=2).double()
    first, second = layer.adapted
    h = one(block(X + X @ first.down.weight.T @ first.up.weight.T))
    wanted = other(block(h + h @ second.down.weight.T @ second.up.weight.T))
    torch.testing.assert_close(layer(X), wanted)
    parts = sum(p.numel() for part in (block, one, other) for p in part.parameters())
    assert sum(p.numel() for p in layer.parameters()) == parts + 4 * 2 * WIDTH
    assert len(layer.state_dict()) == len({p.data_ptr() for p in layer.state_dict().values()})
    block_flops = block.flops_per_token(7)
    others = one.flops_per_token(7) + other.flops_per_token(7) + 8 * 2 * WIDTH
    assert layer.flops_per_token(7) == 2 * block_flops + others


def test_a_shared_transformer_reads_the_input_again_and_enters_the_next_layer_alone() -> None:
    torch.manual_seed(0)
    one, other = (Residual(LSTM(WIDTH), torch.nn.RMSNorm(WIDTH, eps=1e-5)) for _ in range(2))
    layer = SharedTransformer(Stack(one, other), n_heads=2, rank=3, first=False, position="none")
    layer = layer.double()
    (place,), (weights,) = layer.places, layer.blocks
    h = one(X)
    both = weights.norm(torch.cat([h, X], dim=-1))
    low = both @ place.attention.qkv.down.weight.T
    added = [
        part @ up.weight.T
        for part, up in zip(low.split(3, -1), place.attention.qkv.up, strict=True)
    ]
    heads = (weights.qkv(both) + torch.cat(added, -1)).unflatten(-1, (3, 2, WIDTH))
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT * (2 / WIDTH) ** 0.5).masked_fill(
        torch.ones(X.shape[1], X.shape[1]).triu(1).bool(), float("-inf")
    )
    y = weights.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    y = weights.feed_forward_norm(y)
    adapter = place.feed_forward.in_proj
    gate, up = (weights.up(y) + adapter.up[0](adapter.down(y))).chunk(2, -1)
    u = place.out_proj(weights.down(F.gelu(gate) * up))
    torch.testing.assert_close(layer(X), h + other.layer(other.norm(h + u)))
    maps = [p for part in (place, weights) for p in part.parameters() if p.dim() == 2]
    lstms = one.flops_per_token(7) + other.flops_per_token(7)
    scores = 2 * 2 * WIDTH * (7 + 1)
    assert layer.flops_per_token(7) == 2 * sum(p.numel() for p in maps) + lstms + scores


def test_a_map_that_replaces_one_of_a_shared_transformer_counts() -> None:
    layer = SharedTransformer(Stack(LSTM(WIDTH), LSTM(WIDTH)))
    before = layer(X.float())
    weights = layer.blocks[0]
    weights.out_proj = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
    assert not layer(X.float()).allclose(before)


def test_a_copy_of_a_shared_transformer_shares_its_own_weights() -> None:
    import copy

    layer = SharedTransformer(Stack(LSTM(WIDTH), LSTM(WIDTH)))
    twin = copy.deepcopy(layer)
    assert twin.places[1].attention.out_proj.weight is twin.blocks[0].out_proj.weight
    assert twin.blocks[0].out_proj.weight is not layer.blocks[0].out_proj.weight


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoE(WIDTH, experts=2, top_k=3), "top_k must be at most experts"),
        (lambda: SharedTransformer(LSTM(WIDTH), blocks=2), "1 depths, too few for blocks=2"),
    ],
)
def test_impossible_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
