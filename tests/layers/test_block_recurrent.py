import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import BlockRecurrent
from stateline.layers.block_recurrent import GatedUpdate

SMALL = {"n_heads": 2, "window": 3, "n_states": 4, "d_hidden": 5}


def small(**options: object) -> BlockRecurrent:
    return BlockRecurrent(8, **{**SMALL, **options}).double()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query (query, head, d) to every key, without a norm."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).flatten(1)


def split(x: Tensor) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (2, 2, -1)).unbind(dim=-3)


@torch.no_grad()
def test_it_is_the_recurrence_over_blocks() -> None:
    """Block by block; the first has none before it."""
    layer = small(qk_norm=False)
    x = torch.randn(8, 8, dtype=torch.float64)
    y, r = layer.local(x[None])[0], layer.initial
    tokens_k, tokens_v = split(layer.local.kv_proj(x))
    for start in range(0, 8, 3):
        now = slice(start, min(start + 3, 8))
        vectors = layer.norm(r) + layer.ids
        (q, q2), (k, v) = split(layer.qq_proj(vectors)), split(layer.kv_proj(vectors))
        read = attend(layer.cross.q_proj(x[now]).unflatten(-1, (2, -1)), k, v)
        y[now] += layer.cross.out_proj(read)
        both = slice(max(0, start - 3), now.stop)
        z = torch.cat([attend(q, k, v), attend(q2, tokens_k[both], tokens_v[both])], dim=-1)
        keep = layer.mix.keep.sigmoid()
        r = r * keep + layer.mix.propose(z) * (1 - keep)
    torch.testing.assert_close(layer(x[None])[0], y)


def test_the_fixed_gate_keeps_a_constant_part_of_each_entry() -> None:
    update = GatedUpdate(6, 4, gate="fixed")
    r, z = torch.randn(2, 3, 4), torch.randn(2, 3, 6)
    keep = update.keep.sigmoid()
    torch.testing.assert_close(update(r, z), r * keep + update.propose(z) * (1 - keep))


def test_the_gates_of_an_lstm_look_at_the_last_hidden_units_and_lean_to_keeping() -> None:
    update = GatedUpdate(6, 4, gate="lstm", d_hidden=5, bounded=True)
    r, z = torch.randn(2, 3, 4), torch.randn(2, 3, 6)
    y = update.hidden(z).relu()
    forget, enter = update.gates(y).chunk(2, dim=-1)
    wanted = r * (forget + 1).sigmoid() + update.propose(y).tanh() * (enter - 1).sigmoid()
    torch.testing.assert_close(update(r, z), wanted)


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
    assert layer.state_bytes(1) == layer.state_bytes(10_000)


def test_the_vectors_stay_float32() -> None:
    layer = small().bfloat16()
    assert layer.init_state(1).vectors.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_states": 0}, "n_states and d_hidden must be at least 1"),
        ({"n_heads": 3}, "n_heads must divide d_model"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**options)
