"""The core of H3 against its definition, in its three forms."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.flat import h3_core, h3_core_chunk, h3_core_step

BACKENDS = ["torch", "reference"]
SIZES = st.fixed_dictionaries(
    {
        "length": st.sampled_from([1, 2, 5, 13, 33]),
        "taps": st.sampled_from([2, 4, 17]),
        "d_head": st.sampled_from([1, 2, 3]),
        "readouts": st.sampled_from([1, 2]),
        "copies": st.sampled_from([1, 2]),
    }
)


def case(
    length: int = 9, taps: int = 4, d_head: int = 1, readouts: int = 1, copies: int = 2
) -> list[Tensor]:
    """Arguments of ``h3_core_chunk`` with two heads; float64."""
    generator = torch.Generator().manual_seed(length)
    heads, modes = 2, 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    width = heads * d_head
    log_a = torch.stack([-normal(copies, modes).exp(), 3 * normal(copies, modes)], dim=-1)
    return [
        *(normal(2, length, width) for _ in "qkv"),
        normal(width, taps),
        log_a,
        normal(heads, modes, 2),
        normal(readouts * heads, modes, 2),
        normal(readouts * heads),
        normal(2, taps - 1, width),
        normal(2, d_head, d_head, heads, modes, 2),
    ]


def run(backend: str) -> Callable[..., Tensor]:
    return lambda *inputs: h3_core(*inputs, backend=backend)


def run_chunk(backend: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return lambda *inputs: h3_core_chunk(*inputs, backend=backend)


@settings(max_examples=15)
@given(sizes=SIZES)
def test_equals_the_definition(agrees: Callable[..., None], sizes: dict[str, int]) -> None:
    inputs = case(**sizes)
    agrees(run("torch"), run("reference"), inputs[:-2])
    agrees(run_chunk("torch"), run_chunk("reference"), inputs)


def test_the_definition_is_the_formula_of_algorithm_1() -> None:
    """Token by token and head by head, with outer products written out."""
    q, k, v, taps, log_a, b, c, skip, past, state = case(7, d_head=3, readouts=2)
    y, _, after = h3_core_chunk(q, k, v, taps, log_a, b, c, skip, past, state, backend="reference")
    keys = torch.cat([past, k], dim=1)
    a, b, c, x = (torch.complex(t[..., 0], t[..., 1]) for t in (log_a, b, c, state))
    for t in range(7):
        filtered = sum(taps[:, s] * keys[:, 3 + t - s] for s in range(4))
        for head in range(2):
            entries = slice(3 * head, 3 * head + 3)
            kv = filtered[:, entries, None] * v[:, t, None, entries]
            x[..., head, :] = a[head].exp() * x[..., head, :] + b[head] * kv[..., None]
            for readout in range(2):
                output = 2 * readout + head
                read = 2 * (c[output] * x[..., head, :]).sum(dim=-1).real + skip[output] * kv
                wanted = (q[:, t, entries, None] * read).sum(dim=1)
                found = y[:, t, 6 * readout + 3 * head :][:, :3]
                torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(after, torch.view_as_real(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d_head", [1, 2])
def test_a_chunk_from_zero_states_is_the_whole(backend: str, d_head: int) -> None:
    *inputs, past, state = case(d_head=d_head)
    y, _, _ = run_chunk(backend)(*inputs, 0 * past, 0 * state)
    torch.testing.assert_close(y, run(backend)(*inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("taps", [1, 4, 17])
@pytest.mark.parametrize("d_head", [1, 2])
def test_chunks_and_steps_are_the_whole(backend: str, taps: int, d_head: int) -> None:
    q, k, v, filters, *weights, past, state = case(taps=taps, d_head=d_head, readouts=2)
    whole = run_chunk("reference")(q, k, v, filters, *weights, past, state)
    outputs = []
    for first, last in ((0, 4), (4, 6)):
        parts = (t[:, first:last] for t in (q, k, v))
        y, past, state = run_chunk(backend)(*parts, filters, *weights, past, state)
        outputs.append(y)
    reversed_taps = filters
    for t in range(6, 9):
        token = (x[:, t] for x in (q, k, v))
        y, past, state = h3_core_step(*token, reversed_taps, *weights, past, state, backend=backend)
        outputs.append(y[:, None])
    for found, wanted in zip((torch.cat(outputs, dim=1), past, state), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_given_states_are_unchanged(backend: str) -> None:
    q, k, v, taps, *weights, past, state = case()
    before = past.clone(), state.clone()
    run_chunk(backend)(q, k, v, taps, *weights, past, state)
    token = (x[:, 0] for x in (q, k, v))
    h3_core_step(*token, taps, *weights, past, state, backend=backend)
    torch.testing.assert_close((past, state), before, rtol=0, atol=0)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_have_the_dtype_of_the_queries_and_states_keep_theirs(
    backend: str, half: torch.dtype
) -> None:
    q, k, v, *others = (t.float() for t in case())
    y, past, state = run_chunk(backend)(q.to(half), k.to(half), v.to(half), *others)
    assert (y.dtype, past.dtype, state.dtype) == (half, torch.float32, torch.float32)
    y, past, state = h3_core_step(
        *(t[:, 0].to(half) for t in (q, k, v)),
        others[0],
        *others[1:],
        backend=backend,
    )
    assert (y.dtype, past.dtype, state.dtype) == (half, torch.float32, torch.float32)
