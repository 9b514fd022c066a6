from typing import Any, get_args

import pytest
import torch
from torch import nn

from stateline.errors import InputError
from stateline.layers import FeedForward, Ladder, ParallelResidual, Residual, Stack
from stateline.layers.compose import title
from stateline.layers.mixers.feed_forward import Activation
from stateline.layers.norm import RMSNorm
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig


def built(pattern: str, **settings: Any) -> Stack:
    return build_stack(ModelConfig(pattern, **{"vocab_size": 1, "d_model": 8, **settings}))


def kinds(stack: Stack) -> list[str]:
    return [title(link) for link in stack.links]


def test_layers_stand_in_the_order_of_the_pattern_each_followed_by_what_it_wants() -> None:
    assert kinds(built("attention lstm h3*2")) == [
        *("Attention", "FeedForward"),
        "LSTM",  # wants none
        *("H3", "FeedForward", "H3", "FeedForward"),
    ]


def test_without_a_feed_forward_there_are_only_the_layers() -> None:
    assert kinds(built("attention s4d", feed_forward="none")) == ["Attention", "S4D"]


def test_a_wrapper_is_no_residual_branch_and_its_core_is_built_like_a_model() -> None:
    (ladder,) = built("ladder(h3 lstm, passes=3)").links
    assert isinstance(ladder, Ladder)
    assert ladder.passes == 3
    assert isinstance(ladder.core, Stack)
    assert kinds(ladder.core) == ["H3", "FeedForward", "LSTM"]


def test_repeated_layers_have_weights_of_their_own() -> None:
    stack = built("attention*2", feed_forward="none")
    first, second = (link.layer.qkv.weight for link in stack.links)
    assert first is not second
    assert not first.equal(second)


def test_a_parallel_block_is_one_layer_with_its_feed_forward_beside_it() -> None:
    stack = built("attention lstm", block="parallel")
    assert kinds(stack) == ["Attention + FeedForward", "LSTM"]
    assert [type(link) for link in stack.links] == [ParallelResidual, Residual]


def test_a_plain_block_has_neither_norms_nor_residuals() -> None:
    stack = built("attention lstm", block="plain")
    assert [type(link).__name__ for link in stack.links] == ["Attention", "FeedForward", "LSTM"]


def test_keywords_of_the_feed_forward_hold_inside_blocks() -> None:
    (block,) = built("attention", block="parallel", layers={"feed_forward": {"d_hidden": 5}}).links
    assert block.branches[1].layer.in_proj.out_features == 5


def test_every_norm_has_the_epsilon_of_the_configuration() -> None:
    (block,) = built("attention", block="parallel", norm_eps=1e-3).links
    assert [branch.norm.eps for branch in block.branches] == [1e-3, 1e-3]


@pytest.mark.parametrize(("norm", "kind"), [("layer", nn.LayerNorm), ("rms", RMSNorm)])
def test_every_branch_has_the_norm_of_the_configuration(norm: str, kind: type[nn.Module]) -> None:
    assert all(type(link.norm) is kind for link in built("h3 attention", norm=norm).links)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_the_feed_forward_has_the_activation_of_the_configuration(activation: str) -> None:
    _, block = built("h3", feed_forward=activation).links
    assert isinstance(block.layer, FeedForward)
    assert block.layer.activation == activation
    _, named = built("mamba feed_forward", feed_forward=activation).links
    _, own = built("mamba feed_forward(activation=relu)", feed_forward=activation).links
    assert [named.layer.activation, own.layer.activation] == [activation, "relu"]


def test_the_pattern_overrides_the_keywords_of_the_kind() -> None:
    defaults = {"attention": {"n_heads": 2, "position": "rope"}}
    stack = built("attention attention(n_heads=8)", layers=defaults, d_model=16)
    made = [(link.layer.n_heads, str(link.layer.settings.position)) for link in stack.links[::2]]
    assert made == [(2, "rope"), (8, "rope")]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("atention", "unknown layer 'atention': did you mean 'attention'"),
        ("mine", r"; for a layer of your own, import its file \(--import FILE\)$"),
        ("lader(h3)", "unknown layer 'lader': did you mean 'ladder'"),
        ("ladder(atention)", "unknown layer 'atention'"),
        ("ladder", r"ladder wraps other layers: give a pattern, as in ladder\(h3\*2\)"),
        ("ladder(passes=2)", "ladder wraps other layers"),
        (
            "h3(s4d)",
            "takes keyword=value only; only bidirectional, cached_staircase, .* take",
        ),
        ("h3(dstate=4)", "unknown keyword of H3 'dstate': did you mean 'd_state'"),
        ("ladder(h3, pases=2)", "unknown keyword of Ladder 'pases'"),
        ("attention(n_heads=3)", "n_heads must divide d_model, got n_heads=3 and d_model=8"),
    ],
)
def test_mistakes_in_a_pattern_are_named(pattern: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        built(pattern)


def test_keywords_for_an_unknown_kind_are_refused() -> None:
    with pytest.raises(InputError, match="unknown layer 'h33': did you mean 'h3'"):
        built("h3", layers={"h33": {}})


def test_a_group_is_built_as_its_layers_in_turn() -> None:
    grouped, spelled = (
        built(p, feed_forward="none")
        for p in (
            "(lstm*2 attention)*2 ladder((lstm h3)*2)",
            "lstm*2 attention lstm*2 attention ladder(lstm h3 lstm h3)",
        )
    )
    shapes = [{n: p.shape for n, p in s.named_parameters()} for s in (grouped, spelled)]
    assert shapes[0] == shapes[1]
    assert kinds(grouped)[:6] == ["LSTM", "LSTM", "Attention"] * 2


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("h3*9999", "may name at most 512 layers, got 9999"),
        ("ladder(h3*9999)*9999", "may name at most 512 layers, got 99980001"),
        ("(((h3*9999 lstm)*9999 lstm)*9999 lstm)*9999", "may name at most 512 layers, got more"),
        ("staircase(h3, passes=1000000000)", "passes to be at most 16,777,216, got more"),
        (
            "staircase(h3, passes=10000000)",
            "may run at most 4,096 layers, got 10000000: lower .* pa",
        ),
        ("ladder(" * 16 + "lstm" + ")" * 16, "may run at most 4,096 layers, got 65536"),
        ("lstm(n_layers=1000000)", "may run at most 4,096 layers"),
        ("h3(d_state=100000000)", "h3 wants d_state to be at most 16,777,216, got more"),
        ("h3(d_state=18446744073709551616)", "H3 wants d_state to fit into 64 bits"),
        (f"h3(d_state={'9' * 5000})", "wants d_state to be int, got inf"),
    ],
)
def test_a_pattern_that_asks_for_too_much_is_refused_at_once(pattern: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        built(pattern)
    assert len(str(caught.value)) < 300


def test_passes_set_for_a_kind_count_against_the_limit() -> None:
    with pytest.raises(InputError, match="may run at most 4,096 layers, got 5000"):
        built("ladder(lstm)", layers={"ladder": {"passes": 5000}})
    assert len(built("ladder(lstm*4, passes=1024)").links) == 1


def test_a_layer_of_another_width_than_the_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"DiagonalSSM maps 8 channels to 16, .*: set n_outputs=1"):
        built("diagonal_ssm(n_outputs=2)")


@pytest.mark.parametrize("block", ["sequential", "parallel", "post_norm"])
def test_residual_branches_are_scaled(block: str) -> None:
    """The same as with last maps that are smaller by the multiplier."""
    settings: dict[str, Any] = {"block": block, "norm": "rms", "feed_forward": "swiglu"}
    scaled, plain = (
        built("attention", residual_multiplier=0.5, **settings),
        built("attention", **settings),
    )
    weights = scaled.state_dict()
    halved = {n: t / 2 if n.endswith("out_proj.weight") else t for n, t in weights.items()}
    plain.load_state_dict(halved)
    x, state = torch.randn(2, 5, 8), scaled.init_state(2, capacity=5)
    torch.testing.assert_close(scaled(x), plain(x))
    torch.testing.assert_close(scaled.forward_chunk(x, scaled.init_state(2))[0], plain(x))
    steps = [scaled.step_(x[:, t], state) for t in range(5)]
    torch.testing.assert_close(torch.stack(steps, dim=1), plain(x))


def test_only_some_wrappers_take_several_patterns() -> None:
    with pytest.raises(InputError, match="ladder takes one pattern, got 2: put spaces"):
        build_stack(ModelConfig("ladder(h3, s4d)", vocab_size=3))


def test_a_mixture_of_experts_can_be_the_feed_forward_of_blocks() -> None:
    layers = {"moe": {"experts": 4, "top_k": 1}}
    stack = build_stack(ModelConfig("attention*2", 3, feed_forward="moe", layers=layers))
    found = [link.layer for link in stack.links]
    assert [type(layer).__name__ for layer in found] == ["Attention", "MoE"] * 2
    assert found[1].experts == 4
