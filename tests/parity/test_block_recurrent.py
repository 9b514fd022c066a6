"""Block-Recurrent and sliding-window layers against their official code, segment by segment."""

import pytest
import torch
from torch import Tensor

from stateline.layers import BlockRecurrent, FeedForward, Residual, SlidingAttention, Stack
from stateline.layers.norm import NORMS
from stateline.models.convert.single_layers import read_layer
from stateline.ops import LocalWindow, local_attention
from stateline.ops.positions import t5_buckets
from tests.parity.cases import Case, covers


def under(case: Case, prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin so, without the prefix."""
    tensors = case.tensors()
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def official(case: Case) -> Stack:
    """Our layers with official weights."""
    about = case.about["config"]
    width, sizes = about["embed"], {"n_heads": about["heads"], "window": about["window"]}
    if about["recurrent"]:
        update = "single" if about["single_gate"] else "skip" if about["skip_ffn"] else "dual"
        layer: BlockRecurrent | SlidingAttention = BlockRecurrent(
            width,
            **sizes,
            n_states=about["states"],
            gate={"bias": "fixed", "lstm": "lstm"}[about["gate"]],
            update=update,
            d_hidden=about["mlp_dim"],
        )
    else:
        window = {"position": "t5", "includes_self": False, "qk_norm": True}
        layer = SlidingAttention(width, **sizes, **window)
    feed_forward = FeedForward(width, activation="relu", d_hidden=about["mlp_dim"])
    blocks = (Residual(part, NORMS["rms"](width, 1e-6)) for part in (layer, feed_forward))
    stack = Stack(*blocks).double()
    stack.load_state_dict(read_layer("block_recurrent", under(case, "param.")))
    return stack


def compare(case: Case, piece_len: int) -> None:
    """Outputs, keys and values, and state vectors of every segment, in pieces of a length."""
    tensors, stack, about = case.tensors(), official(case), case.about["config"]
    window, limit = about["window"], case.about["atol"]
    segments = tensors["xs"].chunk(about["segments"], dim=1)
    first, *rest = stack.init_state(len(tensors["xs"]))
    state = (first._replace(length=first.length + 2 * window), *rest)  # zeros before the tokens
    for number, x in enumerate(segments):
        outputs = []
        for piece in x.split(piece_len, dim=1):
            y, state = stack.forward_chunk(piece, state)
            outputs.append(y)
        found = {"ys": torch.cat(outputs, dim=1)}
        found["next_keys"] = state[0].k[:, -window:]
        found["next_values"] = state[0].v[:, -window:]
        if about["recurrent"]:
            found["next_rec_state"] = state[0].vectors
        for name, tensor in found.items():
            wanted = tensors[f"{name}.{number}"][:, -tensor.shape[1] :]
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=limit, msg=name)


@covers("block_recurrent_layer", "sliding_window_txl_layer")
@torch.no_grad()
def test_segments_are_the_official_ones(case: Case) -> None:
    about = case.about["config"]
    compare(case, about["window"] * about["windows_per_segment"])


@covers("block_recurrent_layer", "sliding_window_txl_layer")
@torch.no_grad()
def test_cuts_inside_blocks_change_nothing(case: Case) -> None:
    compare(case, case.about["config"]["window"] + 1)


@covers("t5_rel_bias")
def test_buckets_of_distances(case: Case) -> None:
    tensors = case.tensors()
    found = t5_buckets(
        (-tensors["rel"]).clamp(min=0),
        n_buckets=case.about["num_buckets"],
        max_distance=case.about["max_distance"],
    )
    assert torch.equal(found, tensors["bucket"])


@covers("t5_rel_bias")
@pytest.mark.parametrize("includes_memory", [False, True])
def test_what_a_window_sees(case: Case, includes_memory: bool) -> None:
    """Queries and keys of zeros, values that are unit vectors: what comes out has been seen."""
    masks = [t for name, t in case.tensors().items() if name.startswith("causal_mask")]
    for mask in masks:
        length, slots = mask.shape
        if includes_memory != (slots > length):
            continue
        v = torch.eye(slots)[None, :, None]
        # without the query's own slot: the window ends one slot before it
        later = torch.cat([torch.zeros_like(v[:, :1]), v[:, :-1]], dim=1)
        q, k = torch.zeros(1, length, 1, slots), torch.zeros_like(later)
        first = torch.ones(1, dtype=torch.int64)
        found = local_attention(q, k, later, LocalWindow(length, first))[0, :, 0] > 0
        assert torch.equal(found, mask)
