"""Every layer obeys the law, in whatever variant."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers import (
    ATTENTION_WRAPPERS,
    LAYERS,
    NORMS,
    NOT_CAUSAL,
    WRAPPERS,
    AnyLayer,
    NormAfter,
    NormedResidual,
    ParallelResidual,
    PostNorm,
    Residual,
    Stack,
)
from stateline.layers.law import check_layer
from stateline.ops import use_backend

WIDTH = 8

OPTIONS = {
    "attention": [
        {"position": "rope"},
        {"position": "rope(fraction=0.5)", "n_heads": 2},
        {"position": "alibi"},
        {"position": "hard_alibi"},
        {"position": "hard_alibi(masked_heads=1)", "n_heads": 1},
        {"bias": True, "out_scale": 0.6},
        {
            "n_kv_heads": 2,
            "position": "alibi",
            "bias": "qkv",
            "score_scale": 0.7,
            "soft_cap": 0.8,
            "qk_norm": "joint",
        },
        {
            "n_kv_heads": 1,
            "d_head": 4,
            "position": "rope(scaling=llama3(factor=8, original_len=32))",
            "qk_norm": True,
        },
        {
            "d_head": 8,
            "position": "rope(fraction=0.5, scaling=yarn(factor=4, original_len=32, fast=4))",
        },
        {"n_kv_heads": 2, "d_head": 3, "qk_norm": "offset", "gated": True},
    ],
    "block_recurrent": [
        {"window": 3, "n_states": 2, "gate": "lstm", "update": "dual", "d_hidden": 5},
        {
            "window": 2,
            "n_states": 3,
            "update": "single",
            "qk_norm": False,
            "includes_self": True,
        },
    ],
    "block_state": [
        {"window": 2, "variant": "mh", "ssm": "long_conv(filter_len=5)", "includes_self": True},
        {"window": 3, "variant": "mf", "n_states": 2, "d_ssm": 3, "ssm": "s5(d_state=4)"},
        {"window": 3, "n_heads": 3, "d_head": 2, "lift": "full"},
        {"window": 2, "variant": "mf", "n_states": 2, "d_ssm": 3, "lift": "full"},
        {
            "window": 1,
            "variant": "mf",
            "n_states": 2,
            "d_ssm": 3,
            "independent": True,
            "qk_norm": False,
        },
    ],
    "dss": [
        {"d_state": 3, "n_outputs": 2, "exp_frequency": True, "scale": False, "output": "glu"},
        {"d_state": 3, "kernel": "clip", "tie_dt": True},
        {"d_state": 3, "kernel": "softmax", "filter_len": 6, "n_outputs": 2},
        {"d_state": 3, "kernel": "softmax", "filter_len": 1, "tie_dt": True},
    ],
    "feed_forward": [
        {"activation": "gelu_exact"},
        {"activation": "swiglu", "gate_scale": 0.7, "out_scale": 1.4},
        {"activation": "relu"},
        {"activation": "swiglu", "bias": True},
        {"activation": "relu2"},
        {"activation": "geglu"},
        {"activation": "geglu_exact"},
        {"d_hidden": 5},
    ],
    "aft": [{"n_heads": 1, "window": 1}, {"n_heads": 2, "window": 5}],
    "gated_conv": [{"taps": 1}, {"taps": 4, "bias": True}],
    "gated_delta_net": [
        {"n_heads": 1, "d_conv": 1},
        {"n_heads": 4, "n_key_heads": 2, "d_key": 3, "expand_v": 4 / 3, "d_conv": 2},
        {"n_heads": 4, "n_key_heads": 2, "n_products": 3, "reflects": True, "expand_v": 1},
        {"n_heads": 1, "gated": False, "expand_v": 1},
    ],
    "gated_linear_attention": [
        {"n_heads": 1, "expand_k": 0.25, "rank": 2, "temperature": 2.0},
        {"n_heads": 2, "expand_v": 1.5, "temperature": 0.1},
    ],
    "gss": [{"d_state": 4}, {"d_ssm": 3, "expand": 1, "d_state": 3, "exp_frequency": False}],
    "h3": [
        {"d_state": 4},
        {"d_state": 4, "d_head": 2},
        {"d_state": 4, "d_head": 4},
        {"d_state": 4, "d_head": 2, "n_ssm": 2, "n_outputs": 3},
        {"d_state": 4, "discretization": "zoh", "max_len": 64},
    ],
    "channel_mixing": [{"d_hidden": 5}],
    "hgrn2": [
        {"n_heads": 2, "expand_k": 2.0, "lower_bound": 0.3},
        {"n_heads": 8},
        {"lower_bound": 0.2, "learns_bound": True},
    ],
    "hyena": [{"filter_len": 4, "d_conv": 1, "shift": 0.1}, {"filter_len": 1, "n_features": 3}],
    "kimi_delta_attention": [{"n_heads": 2, "d_head": 3, "rank": 1}, {"n_heads": 1, "d_conv": 1}],
    "latent_attention": [
        {"n_heads": 1, "d_latent": 3, "d_rotary": 4, "rope_base": 100.0},
        {"n_heads": 3, "d_head": 5, "position": "none"},
    ],
    "lightning_attention": [{"n_heads": 2, "decay_scale": 0.0}, {"d_head": 3}],
    "linear_attention": [
        {"feature": "relu", "n_heads": 2},
        {"feature": "identity", "normalise": False},
        {"normalise": False, "n_heads": 1},
        {"feature": "random", "n_features": 3},
        {"feature": "taylor", "n_heads": 2},
    ],
    "long_conv": [
        {"filter_len": 4, "n_filters": 3, "n_features": 3, "d_hidden": 5, "n_hidden": 1},
        {"filter_len": 1, "shift": 0.1},
    ],
    "lstm": [{"n_layers": 2}],
    "mamba": [
        {"d_state": 1, "dt_rank": 3, "bias": True},
        {"d_conv": 1, "expand": 1.5, "norm_eps": 1e-6},
    ],
    "mamba2": [
        {"d_state": 4, "d_head": 4, "n_groups": 2, "bias": True},
        {"d_state": 3, "d_head": 1, "d_conv": 2, "expand": 1.0},
        {
            "d_state": 2,
            "d_head": 4,
            "normalise": False,
            "multipliers": "multipliers(z=0.5, step=1.2)",
        },
    ],
    "mamba3": [
        {"d_state": 4, "d_head": 4, "n_groups": 2, "rope_fraction": 1.0, "out_norm": True},
        {"d_state": 6, "d_head": 8, "mimo_rank": 3, "pairs": "halves", "expand": 1.0},
    ],
    "mlstm": [
        {"n_heads": 2, "expand_k": 1.0, "soft_cap": 1.0, "divisor_eps": 0.1, "norm_eps": 0.1},
        {"n_heads": 1, "expand_v": 1.5},
    ],
    "moe": [
        {"experts": 3, "top_k": 1, "d_hidden": 5, "activation": "gelu"},
        {
            "scores": "sigmoid",
            "correction": True,
            "scale": 2.5,
            "shared": "expert(d_hidden=3, gate=true)",
        },
        {"experts": 4, "top_k": 4, "shared": 2, "normalise": False},
        {"experts": 3, "normalise_eps": 0.1, "scores": "sigmoid"},
    ],
    "retention": [{"n_heads": 1, "expand_v": 0.5}, {"n_heads": 2}],
    "rg_lru": [{"d_inner": 6, "n_heads": 3, "d_conv": 1}, {"n_heads": 1}],
    "slstm": [{"n_heads": 2, "d_conv": 1}, {"n_heads": 1, "norm_eps": 1e-3}],
    "rwkv7": [{"n_heads": 1, "rank": 2}, {"n_heads": 2, "gate_rank": 3}],
    "s4": [{"d_state": 4}, {"d_state": 6, "n_ssm": 2, "n_outputs": 2, "output": "linear"}],
    "s4d": [
        {"d_state": 4, "init": init, "discretization": discretization}
        for init in ("lin", "inv", "legs")
        for discretization in ("zoh", "bilinear")
    ]
    + [
        {"d_state": 4, "n_ssm": 2, "n_outputs": 3, "output": "glu"},
        {"d_state": 4, "real_transform": "softplus", "output": "half_glu"},
    ],
    "sliding_attention": [
        {"window": 4},
        {"window": 1},
        {"window": 3, "position": "rope"},
        {
            "window": 3,
            "n_kv_heads": 2,
            "d_head": 4,
            "position": "rope(fraction=0.5, scaling=linear(factor=2))",
            "bias": "out",
            "score_scale": 1.0,
            "soft_cap": 0.8,
        },
        {"window": 5, "position": "alibi", "bias": True},
        {"window": 4, "position": "relative"},
        {"window": 3, "position": "relative", "includes_self": False},
        {"window": 3, "position": "t5", "includes_self": False, "qk_norm": True},
        {"window": 3, "blocks": True, "position": "alibi", "qk_norm": True},
        {"window": 2, "blocks": True, "position": "relative", "includes_self": False},
    ],
    "s5": [
        {"d_state": 8, "n_blocks": 2, "discretization": "bilinear", "output": "linear"},
        {"d_state": 6, "conj_sym": False, "clip_eigs": False, "output": "glu"},
    ],
    "shift_ssm": [{"d_state": 1}, {"d_state": 4}],
}


def hybrid() -> Stack:
    """A core that has everything."""
    h3 = LAYERS["h3"](WIDTH, d_state=4)
    return Stack(h3, LAYERS["attention"](WIDTH, position="rope"))


def residual_blocks() -> Stack:
    h3, lstm = LAYERS["h3"](WIDTH, d_state=4), LAYERS["lstm"](WIDTH)
    return Stack(Residual(h3, NORMS["layer"](WIDTH)), Residual(lstm, NORMS["rms"](WIDTH)))


def parallel_block() -> ParallelResidual:
    """As in GPT-NeoX, with a second layer that has a state."""
    layers = (LAYERS["attention"](WIDTH, position="rope"), LAYERS["lstm"](WIDTH))
    parts = (*layers, LAYERS["feed_forward"](WIDTH, activation="gelu_exact"))
    return ParallelResidual(*(Residual(part, NORMS["layer"](WIDTH)) for part in parts))


def attentions() -> Stack:
    """A core that can attend to what it is given, in every kind of branch."""
    return Stack(
        Residual(LAYERS["attention"](WIDTH, position="rope"), NORMS["layer"](WIDTH)),
        Residual(LAYERS["feed_forward"](WIDTH), NORMS["layer"](WIDTH)),
        PostNorm(LAYERS["sliding_attention"](WIDTH, window=7), NORMS["layer"](WIDTH)),
        LAYERS["attention"](WIDTH, position="hard_alibi"),
    )


def slides(**options: object) -> Stack:
    return Stack(
        *(
            Residual(LAYERS["sliding_attention"](WIDTH, **options), NORMS["layer"](WIDTH))
            for _ in range(2)
        )
    )


def _title(name: str, options: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"


KINDS: dict[str, Callable[[], AnyLayer]] = {
    **{name: partial(kind, WIDTH) for name, kind in LAYERS.items()},
    # With two entries a key is often near zero by cancellation; in bfloat16 it then has no
    # direction left, whatever computes it.
    "gated_delta_net": partial(LAYERS["gated_delta_net"], WIDTH, n_heads=1),
    **{
        _title(name, options): partial(LAYERS[name], WIDTH, **options)
        for name, variants in OPTIONS.items()
        for options in variants
    },
    **{
        name: lambda kind=kind, core=attentions if name in ATTENTION_WRAPPERS else hybrid: kind(
            core()
        )
        for name, kind in WRAPPERS.items()
        if name not in NOT_CAUSAL
    },
    **{
        f"parallel({join})": lambda join=join: WRAPPERS["parallel"](hybrid(), join=join)
        for join in ("norm", "hymba", "adapter")
    },
    "shared(three depths)": lambda: WRAPPERS["shared"](
        Stack(*(LAYERS[name](WIDTH) for name in ("attention", "lstm", "h3", "s4d"))), rank=2
    ),
    "shared_transformer(two transformers)": lambda: WRAPPERS["shared_transformer"](
        Stack(residual_blocks(), LAYERS["s4d"](WIDTH), residual_blocks(), hybrid()),
        blocks=2,
        rank=2,
        n_heads=2,
        first=False,
        bias=True,
    ),
    "value_residual(rwkv7)": lambda: WRAPPERS["value_residual"](
        Stack(
            LAYERS["rwkv7"](WIDTH, n_heads=2, rank=2),
            LAYERS["channel_mixing"](WIDTH),
            Residual(LAYERS["rwkv7"](WIDTH, rank=2), NORMS["layer"](WIDTH)),
        ),
        rank=2,
    ),
    "ladder(passes=3)": lambda: WRAPPERS["ladder"](LAYERS["s4d"](WIDTH, d_state=4), passes=3),
    **{
        f"staircase({core}, {passes=}, {chunk_len=})": lambda core=core, n=passes, c=chunk_len: (
            WRAPPERS["staircase"](LAYERS[core](WIDTH), passes=n, chunk_len=c)
        )
        for core, passes, chunk_len in [
            ("attention", 3, 2),
            ("attention", 1, 3),
            ("lstm", 4, 1),
            ("s4d", 2, 3),
            ("h3", 2, 2),
            ("sliding_attention", 3, 3),
        ]
    },
    "staircase(staircase)": lambda: WRAPPERS["staircase"](
        WRAPPERS["staircase"](LAYERS["attention"](WIDTH), chunk_len=2), chunk_len=3
    ),
    **{
        f"cached_staircase({passes=}, {chunk_len=}, {steps=})": (
            lambda n=passes, c=chunk_len, s=steps: WRAPPERS["cached_staircase"](
                LAYERS["attention"](WIDTH, position="rope"), passes=n, chunk_len=c, steps=s
            )
        )
        for passes, chunk_len, steps in [(1, 1, 6), (2, 2, 3), (3, 2, 5), (2, 3, 2), (2, 3, None)]
    },
    "cached_staircase(passes=0)": lambda: WRAPPERS["cached_staircase"](
        LAYERS["attention"](WIDTH), passes=0, chunk_len=1, steps=None
    ),
    "state_passing(chunk_len=3)": lambda: WRAPPERS["state_passing"](hybrid(), chunk_len=3),
    "cached_staircase(ladder)": lambda: WRAPPERS["cached_staircase"](
        WRAPPERS["ladder"](slides(position="alibi")), passes=2, chunk_len=2, steps=4
    ),
    "feedback(strict, window=5)": lambda: WRAPPERS["feedback"](
        slides(position="relative", includes_self=False), window=5
    ),
    "feedback(shared)": lambda: WRAPPERS["feedback"](slides(position="alibi"), shared=True),
    "post-norm block": lambda: PostNorm(LAYERS["lstm"](WIDTH), NORMS["layer"](WIDTH)),
    "norm after": lambda: NormAfter(LAYERS["lstm"](WIDTH), NORMS["rms"](WIDTH)),
    "normed residual": lambda: NormedResidual(
        LAYERS["lstm"](WIDTH), NORMS["rms"](WIDTH), 0.5, stream_multiplier=2.0
    ),
    "residual blocks": residual_blocks,
    "parallel block": parallel_block,
}


def make(kind: str) -> AnyLayer:
    torch.manual_seed(0)
    return KINDS[kind]()


def law(kind: str, **options: Any) -> None:
    report = check_layer(make(kind), **options)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_holds(kind: str) -> None:
    law(kind, chunks=(4, 1, 3), length=0)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2, phases=[Phase.generate])  # shrinking takes minutes
@given(
    batch_size=st.integers(2, 4),
    chunks=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_law_holds_for_any_cut(
    kind: str, batch_size: int, chunks: Sequence[int], seed: int
) -> None:
    law(kind, batch_size=batch_size, chunks=chunks, seed=seed)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_holds_in_float32(kind: str) -> None:
    law(kind, dtype=torch.float32)


def test_the_law_can_be_checked_at_width_one() -> None:
    """A layer normalisation of one channel gives zero, so the output does not vary at all."""
    for layer in (LAYERS["lstm"](1), LAYERS["attention"](1, n_heads=1)):
        report = check_layer(Residual(layer, NORMS["layer"](1)), chunks=(2, 1, 2))
        assert report.ok, str(report)
    silent = LAYERS["linear_attention"](1, n_heads=1)
    torch.nn.init.zeros_(silent.out_proj.weight)
    errors = {finding.clause: finding.error for finding in check_layer(silent).findings}
    assert errors["no output sees a later input"] == 0


def _everything(layer: AnyLayer, x: Tensor) -> list[Tensor]:
    """Outputs of all verbs, the state, and gradients."""
    y = layer(x)
    y_chunk, state = layer.forward_chunk(x, layer.init_state(len(x)))
    y_step, state = layer.step(x[:, 0], state)
    loss = sum(t.square().sum() for t in (y, y_chunk, y_step))
    gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
    return [y, y_chunk, y_step, *pytree.tree_leaves(state), *gradients]


@pytest.mark.parametrize("kind", KINDS)
def test_backends_do_not_change_what_a_layer_computes(kind: str) -> None:
    layer = make(kind).double()
    x = layer.example_input(2, 9).requires_grad_()
    with use_backend("torch"):
        found = _everything(layer, x)
    with use_backend("reference"):
        wanted = _everything(layer, x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_chunk_changes_nothing_and_returns_a_copy(kind: str) -> None:
    layer = make(kind)
    with torch.no_grad():
        _, state = layer.forward_chunk(layer.example_input(2, 3), layer.init_state(2))
        y, after = layer.forward_chunk(layer.example_input(2, 0), state)
    assert y.shape == (2, 0, WIDTH)
    for a, b in zip(pytree.tree_leaves(after), pytree.tree_leaves(state), strict=True):
        torch.testing.assert_close(a, b)
        assert not a.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
