import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stateline.errors import InputError
from stateline.layers import DSS, AnyLayer, BlockRecurrent, BlockState, nbytes
from stateline.layers.mixers.diagonal_ssm import DiagonalSSM
from stateline.layers.mixers.long_conv import ImplicitFilters
from stateline.layers.mixers.s4 import S4SSM
from stateline.layers.mixers.s5 import S5SSM
from stateline.ops import use_backend

SMALL = {"n_heads": 2, "window": 3, "n_states": 4, "d_ssm": 3, "ssm": "s4d(d_state=4)"}


def small(**options: object) -> BlockState:
    return BlockState(8, **{**SMALL, **options}).double()


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def context_of(layer: BlockState, c: Tensor, t: int, head: int) -> Tensor:
    """Context states (state, d_ssm) that one head sees at token t, before their norm."""
    block = t // layer.window
    if layer.variant == "mf":
        return layer.initial if block == 0 else c[block * layer.window - 1].view(-1, layer.d_ssm)
    seen = c[block * layer.window : t + 1].unflatten(1, (-1, layer.d_ssm))
    return seen[:, head if layer.variant == "mh" else 0]


def head_of_token(layer: BlockState, x: Tensor, c: Tensor, t: int, head: int) -> Tensor:
    """What one head finds in the context states, for a token of one row."""
    ids = 0 if layer.ids is None else layer.ids
    context = context_of(layer, c, t, head)
    context = F.rms_norm(context, (layer.d_ssm,), layer.norm.weight, 1e-6) + ids
    w = layer.w_kv[head] if layer.variant == "mh" else layer.w_kv[0]
    readers = len(layer.w_kv)
    kv = (context @ w).unflatten(-1, (2, layer.cross.n_heads // readers, -1))
    k, v = kv[:, :, 0 if layer.variant == "mh" else head].unbind(dim=1)
    q = layer.cross.q_proj(x[t]).unflatten(-1, (layer.cross.n_heads, -1))[head]
    if layer.cross.scale is None:
        return (k @ q / len(q) ** 0.5).softmax(dim=0) @ v
    return (unit(k) @ unit(q) * layer.cross.scale[head]).softmax(dim=0) @ v


@pytest.mark.parametrize("variant", ["sh", "mh", "mf"])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_it_is_the_formula(variant: str, qk_norm: bool) -> None:
    layer = small(variant=variant, qk_norm=qk_norm)
    assert (layer.cross.scale is not None) is qk_norm
    if qk_norm:
        layer.cross.scale.copy_(torch.tensor([0.5, 3.0]))
    x = torch.randn(1, 8, 8, dtype=torch.float64)
    c = layer.ssm(layer.narrow(x))[0]
    wanted = layer.local(x)[0]
    for t in range(8):
        heads = [head_of_token(layer, x[0], c, t, head) for head in range(2)]
        wanted[t] += layer.cross.out_proj(torch.cat(heads))
    torch.testing.assert_close(layer(x)[0], wanted)


@pytest.mark.parametrize("kind", [BlockState, BlockRecurrent])
@pytest.mark.parametrize(
    ("options", "past"), [({}, 0), ({"qk_norm": False}, 0), ({"includes_self": True}, 0), ({}, 3)]
)
@torch.no_grad()
def test_tokens_attend_to_the_window_with_the_bias_of_t5(
    kind: type[BlockState | BlockRecurrent], options: dict[str, bool], past: int
) -> None:
    """Also to zeros before the first token, if the state says that it holds them."""
    local = kind(8, n_heads=2, window=3, **options).double().local
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    q, k, v = torch.cat([local.q_proj(x[0]), local.kv_proj(x[0])], -1).view(7, 3, 2, 4).unbind(1)
    scale = torch.tensor([0.5, 3.0], dtype=torch.float64)[:, None, None]
    if options.get("qk_norm", True):
        local.scale.copy_(scale.flatten())
        q, k = unit(q), unit(k)
    else:
        q, scale = q / 4**0.5, 1
    k, v = (torch.cat([t.new_zeros(past, 2, 4), t]) for t in (k, v))
    distance = past + torch.arange(7)[:, None] - torch.arange(past + 7)
    bias = local.bucket_bias[:, distance.clamp(min=0)]  # near distances have their own buckets
    scores = (torch.einsum("qhd,khd->hqk", q, k) + bias) * scale
    nearest = 0 if options.get("includes_self") else 1
    unseen = (distance < nearest) | (distance >= nearest + 3)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1).nan_to_num()
    wanted = local.out_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    empty = local.init_state(1)
    y, _ = local.forward_chunk(x, empty._replace(length=empty.length + 2 * past))
    torch.testing.assert_close(y[0], wanted)


@pytest.mark.parametrize(
    ("ssm", "wanted"),
    [
        ("dss(d_state=6)", DSS(3, d_state=6, n_outputs=2, kernel="exp").ssm),
        ("long_conv(filter_len=5)", ImplicitFilters(3, n_filters=2, filter_len=5)),
        ("s4(d_state=6)", S4SSM(3, d_state=6, n_outputs=2)),
        (
            "s4d(d_state=6)",
            DiagonalSSM(3, d_state=6, n_outputs=2, init="lin", discretization="zoh"),
        ),
        ("s5(d_state=6)", S5SSM(3, d_state=6, n_outputs=2, discretization="zoh")),
    ],
    ids=["dss", "long_conv", "s4", "s4d", "s5"],
)
@torch.no_grad()
def test_the_state_space_model_underneath(ssm: str, wanted: AnyLayer) -> None:
    made = BlockState(8, n_heads=2, variant="mh", ssm=ssm, d_ssm=3).ssm
    assert type(made) is type(wanted)
    assert torch.equal(made.frequency, wanted.frequency)
    wanted.load_state_dict(made.state_dict())
    x = torch.randn(1, 7, 3)
    torch.testing.assert_close(made(x), wanted(x))


def test_the_context_of_a_block_holds_nothing_of_it() -> None:
    """The published pseudo-code shifts along filters: a block would see its own last token."""
    layer = small(variant="mf")
    x = torch.randn(1, 9, 8, dtype=torch.float64, requires_grad=True)
    for block, context in enumerate(layer.context_states(x).unbind(dim=1)):
        (grad,) = torch.autograd.grad(context.sum(), x, retain_graph=True, allow_unused=True)
        reached = torch.zeros(9) if grad is None else grad[0].abs().sum(dim=-1)
        assert (reached > 1e-9).nonzero().flatten().tolist() == list(range(block * layer.window))


def test_the_learned_context_is_that_of_the_first_block_alone() -> None:
    layer = small(variant="mf")
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    for t, seen in [(0, True), (2, True), (3, False), (6, False)]:
        (grad,) = torch.autograd.grad(layer(x)[0, t].sum(), layer.initial, allow_unused=True)
        assert bool(grad.any()) is seen


def test_more_filters_need_no_larger_state_of_the_ssm_unless_they_are_independent() -> None:
    def size(n_states: int, independent: bool) -> int:
        layer = small(variant="mf", n_states=n_states, independent=independent)
        return nbytes(layer.init_state(1).ssm)

    assert size(2, False) == size(6, False)
    assert size(6, True) == 3 * size(2, True)


def test_the_ssm_works_at_a_quarter_of_the_width_and_at_an_eighth_for_many_filters() -> None:
    assert [BlockState(64, variant=v).d_ssm for v in ("sh", "mh", "mf")] == [16, 16, 8]


@pytest.mark.parametrize("variant", ["sh", "mh", "mf"])
@pytest.mark.parametrize("ssm", ["dss", "long_conv(filter_len=6)", "s4", "s4d", "s5"])
@torch.no_grad()
def test_any_ssm_streams_over_the_ends_of_blocks(ssm: str, variant: str) -> None:
    layer = small(variant=variant, ssm=ssm)
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    state, outputs = layer.init_state(2), []
    for piece in x.split([1, 4, 5, 1], dim=1):
        y, state = layer.forward_chunk(piece, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x), rtol=1e-9, atol=1e-10)


def test_the_state_has_a_constant_size() -> None:
    for variant in ("sh", "mh", "mf"):
        layer = small(variant=variant)
        state = layer.init_state(2)
        for _ in range(4):
            state = layer.forward_chunk(torch.randn(2, 5, 8, dtype=torch.float64), state)[1]
            assert nbytes(state) == 2 * layer.state_bytes(10_000)


@pytest.mark.parametrize("variant", ["sh", "mh", "mf"])
@pytest.mark.usefixtures("windows_without_operations")
@torch.no_grad()
def test_operations_are_those_that_pytorch_counts(variant: str) -> None:
    """It counts whole blocks for ``sh`` and ``mh``, and neither the window nor a filter."""
    layer = small(variant=variant, ssm="long_conv(filter_len=6)", window=4)

    def count(length: int) -> int:
        math, torch_ops = sdpa_kernel(SDPBackend.MATH), use_backend("torch", local_attention="free")
        with math, torch_ops, FlopCounterMode(display=False) as counter:
            layer(torch.randn(1, length, 8, dtype=torch.float64))
        return counter.get_total_flops()

    window = 4 * 8 * sum(min(t, 4) for t in range(32)) / 32
    masked = 0 if variant == "mf" else 4 * 8 * 1.5
    wanted = (count(32) - count(16)) / 16 + window - masked + layer.ssm.flops_per_token(32)
    assert layer.flops_per_token(32) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 3}, "n_heads must divide d_model"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**options)


@pytest.mark.parametrize("variant", ["sh", "mf"])
def test_a_full_lift_is_its_formula(variant: str) -> None:
    layer = BlockState(12, n_heads=2, d_head=5, window=3, variant=variant, n_states=4, lift="full")
    context = torch.randn(2, 4, layer.d_ssm)
    lifted = context @ layer.w_lift
    normed = lifted / (lifted.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    normed = normed if layer.ids is None else normed + layer.ids
    keys, values = (normed @ layer.w_kv[0]).unflatten(-1, (2, 2, 5)).unbind(dim=-3)
    k, v = layer.keys_and_values(context)
    torch.testing.assert_close(k, F.normalize(keys, dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(v, values)
    assert layer.ids is None or layer.ids.shape == (4, 12)
    assert layer(torch.randn(1, 7, 12)).shape == (1, 7, 12)


def test_heads_have_their_own_maps_and_no_full_lift() -> None:
    with pytest.raises(InputError, match="full for sh and mf"):
        BlockState(8, variant="mh", lift="full")
