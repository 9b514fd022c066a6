"""Our ops and layers against the plain recurrences of a checkout of flash-linear-attention.

Run with ``--fla=FOLDER``, a checkout of fla-org/flash-linear-attention; they need einops. The
vectors in ``vectors/fla`` hold a small part of the same, without a checkout.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stateline.bench import fla_naive
from stateline.bench.peers import bare_layer
from stateline.ops import OPS, use_backend
from tests.ops.flat import delta_rule, gated_delta_rule, linear_attention

BATCH, HEADS, KEYS, VALUES = 2, 4, 8, 6
ALIKE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    folder: Path | None = request.config.getoption("--fla")
    if folder is None:
        pytest.skip("no checkout of flash-linear-attention: name its folder with --fla=FOLDER")
    fla_naive.register(folder)
    yield
    fla_naive.unregister()


def drawn(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


@pytest.mark.parametrize("backend", ["numba", "torch", "reference"])
@pytest.mark.parametrize("length", [1, 64, 100])
@pytest.mark.parametrize("op", ["per head", "per entry", "delta_rule", "gated_delta_rule"])
def test_ops_are_its_recurrences(op: str, length: int, backend: str) -> None:
    torch.manual_seed(0)
    q, k = (drawn(length, HEADS, KEYS) / KEYS**0.5 for _ in "qk")
    v, state = drawn(length, HEADS, VALUES), drawn(HEADS, KEYS, VALUES)
    by_head, by_entry = (-torch.rand(BATCH, length, HEADS, *more) for more in ((), (KEYS,)))
    run, given = {
        "per head": (linear_attention, (by_head, state)),
        "per entry": (linear_attention, (by_entry, state)),
        "delta_rule": (delta_rule, (by_entry, k.flip(1), -k, state)),
        "gated_delta_rule": (gated_delta_rule, (by_head, by_head.exp(), state)),
    }[op]
    wanted = run(q, k, v, *given, backend=fla_naive.BACKEND)
    torch.testing.assert_close(run(q, k, v, *given, backend=backend), wanted, **ALIKE)


@pytest.mark.parametrize(
    "pattern",
    [
        "gated_delta_net",
        "gated_delta_net(n_products=2, reflects=true)",
        "gated_linear_attention",
        "hgrn2",
        "kimi_delta_attention",
        "lightning_attention",
        "mamba2",
        "retention",
        "rwkv7",
    ],
)
def test_layers_are_the_same_with_its_recurrences(pattern: str) -> None:
    torch.manual_seed(0)
    layer, x = bare_layer(pattern, 32), drawn(100, 32)
    found = []
    for backend in (fla_naive.BACKEND, "auto"):
        with torch.no_grad(), use_backend(backend):
            y, state = layer.forward_chunk(x, layer.init_state(BATCH))
            found.append((y, layer.step(x[:, 0], state)[0]))
    torch.testing.assert_close(*found, **ALIKE)


def test_it_has_whole_sequences_and_steps_of_the_three_ops() -> None:
    for name in ("linear_attention", "delta_rule", "gated_delta_rule"):
        for function in (name, f"{name}_step", f"{name}_step_"):
            assert not OPS[name].reasons(function)[fla_naive.BACKEND]
