import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stateline.errors import InputError
from stateline.layers import BlockRecurrent, nbytes
from stateline.layers.mixers.block_recurrent import GatedUpdate
from stateline.layers.norm import unit_length

SMALL = {"n_heads": 2, "window": 3, "n_states": 4, "d_hidden": 5}


def small(**options: object) -> BlockRecurrent:
    return BlockRecurrent(8, **{**SMALL, **options}).double()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None) -> Tensor:
    """Every query (query, head, d) to every key; with a scale per head, both have length one."""
    if scale is None:
        q = q / q.shape[-1] ** 0.5
    else:
        q, k = unit_length(q) * scale[:, None], unit_length(k)
    weights = torch.einsum("qhd,khd->hqk", q, k).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def split(x: Tensor) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (2, 2, -1)).unbind(dim=-3)


def gated(part: GatedUpdate, gate: str, r: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """Part of the old r and part of the new h; what may look at y leans to keeping."""
    if gate == "fixed":
        keep = part.keep.sigmoid()
        return r * keep + h * (1 - keep)
    forget, enter = part.gates(y).chunk(2, dim=-1)
    return r * (forget + 1).sigmoid() + h * (enter - 1).sigmoid()


def updated(layer: BlockRecurrent, gate: str, r: Tensor, z: Tensor) -> Tensor:
    """The state vectors after a block, from what they have found in it."""
    if layer.settings.update == "single":
        y = layer.mix.hidden(z).relu()
        return gated(layer.mix, gate, r, layer.mix.propose(y).tanh(), y)
    r = gated(layer.mix, gate, r, layer.mix.propose(z), z)
    if layer.settings.update == "skip":
        return r
    y = layer.feed.hidden(rms(r, layer.feed_norm.weight)).relu()
    return gated(layer.feed, gate, r, layer.feed.propose(y), y)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


@pytest.mark.parametrize("update", ["skip", "dual", "single"])
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_it_is_the_recurrence_over_blocks(update: str, gate: str, qk_norm: bool) -> None:
    """Block by block; the first has none before it."""
    layer = small(update=update, gate=gate, qk_norm=qk_norm)
    for parameter in layer.parameters():  # no scale is one, and no two are equal
        parameter.add_(torch.randn_like(parameter) / 2)
    x = torch.randn(8, 8, dtype=torch.float64)
    y, r = layer.local(x[None])[0], layer.initial
    tokens_k, tokens_v = split(layer.local.kv_proj(x))
    assert (layer.cross.scale is not None) is qk_norm
    among, across = layer.scales if qk_norm else (None, None)
    for start in range(0, 8, 3):
        now = slice(start, min(start + 3, 8))
        vectors = rms(r, layer.norm.weight) + layer.ids
        (q, q2), (k, v) = split(layer.qq_proj(vectors)), split(layer.kv_proj(vectors))
        read = attend(layer.cross.q_proj(x[now]).unflatten(-1, (2, -1)), k, v, layer.cross.scale)
        y[now] += layer.cross.out_proj(read)
        both = slice(max(0, start - 3), now.stop)
        found = attend(q, k, v, among), attend(q2, tokens_k[both], tokens_v[both], across)
        r = updated(layer, gate, r, torch.cat(found, dim=-1))
    torch.testing.assert_close(layer(x[None])[0], y)


@pytest.mark.parametrize("update", ["skip", "dual", "single"])
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
@pytest.mark.usefixtures("windows_without_operations")
@torch.no_grad()
def test_operations_are_those_that_pytorch_counts(update: str, gate: str) -> None:
    """It counts all but the window."""
    layer = small(update=update, gate=gate, window=4)

    def count(length: int) -> int:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            layer(torch.randn(1, length, 8, dtype=torch.float64))
        return counter.get_total_flops()

    window = 4 * 8 * sum(min(t, 4) for t in range(32)) / 32
    assert layer.flops_per_token(32) == (count(32) - count(16)) / 16 + window


@pytest.mark.parametrize(("update", "gates"), [("skip", 1), ("dual", 2), ("single", 1)])
def test_the_number_of_gates(update: str, gates: int) -> None:
    parts = [part for part in small(update=update).modules() if isinstance(part, GatedUpdate)]
    assert len(parts) == gates


@torch.no_grad()
def test_decoding_updates_the_vectors_at_the_ends_of_blocks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, now, calls = small(), [0], []
    forward = GatedUpdate.forward

    def counted(update: GatedUpdate, r: Tensor, z: Tensor) -> Tensor:
        calls.append(now[0])
        return forward(update, r, z)

    monkeypatch.setattr(GatedUpdate, "forward", counted)
    state = layer.init_state(1)
    for now[0] in range(10):
        _, state = layer.step(torch.randn(1, 8, dtype=torch.float64), state)
    assert calls == [2, 5, 8]


def test_the_state_has_a_constant_size() -> None:
    layer = small()
    state = layer.init_state(2)
    for _ in range(4):
        state = layer.forward_chunk(torch.randn(2, 5, 8, dtype=torch.float64), state)[1]
        assert nbytes(state) == 2 * layer.state_bytes(10_000)


def test_the_vectors_stay_float32() -> None:
    layer = small().bfloat16()
    assert layer.init_state(1).vectors.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 3}, "n_heads must divide d_model"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**options)
