"""States that are kept in half precision between steps: computed in float32, rounded once."""

import pytest
import torch
from torch.utils import _pytree as pytree

from stateline.generate.session import Session
from stateline.generate.session_state import prefill
from stateline.layers import LAYERS
from stateline.layers.state import copied, nbytes
from stateline.layers.stored_state import stored, stored_bytes
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.ops import use_backend

WRAPPED = ["ladder(h3 lstm)", "staircase(s4d, chunk_len=2)", "state_passing(h3, chunk_len=4)"]
QUICK = ["h3", "mamba", "lstm", "gated_delta_net", "staircase(s4d, chunk_len=2)"]
ALL = [*(name for name in LAYERS if name != "bidirectional_s5"), *WRAPPED]
PATTERNS = [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in ALL]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_step_rounds_only_what_it_writes(pattern: str, backend: str) -> None:
    """One step from a rounded state is the step in float32 from the same numbers."""
    torch.manual_seed(0)
    stack = build_stack(ModelConfig(pattern, vocab_size=1, d_model=8)).eval()
    with torch.no_grad(), use_backend(backend):
        begun = stack.init_state(2, capacity=9)
        _, state = stack.forward_chunk(torch.randn(2, 7, 8), begun)
        half = copied(stored(state, torch.bfloat16))
        same = copied(stored(half, torch.float32))
        x = torch.randn(2, 8)
        y, y_half = stack.step_(x, same), stack.step_(x, half)
    torch.testing.assert_close(y_half, y, rtol=1e-5, atol=1e-5)
    rounded = stored(same, torch.bfloat16)
    for found, wanted in zip(*map(pytree.tree_leaves, (half, rounded)), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-5)


def test_half_precision_halves_the_states_of_h3() -> None:
    stack = build_stack(ModelConfig("h3 mamba", vocab_size=1, d_model=8))
    state = stack.init_state(3)
    assert nbytes(stored(state, torch.bfloat16)) == nbytes(state) / 2


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_bytes_of_a_stored_state_are_known_before_it_is_made(pattern: str) -> None:
    stack = build_stack(ModelConfig(pattern, vocab_size=1, d_model=8)).eval()
    with torch.no_grad():
        _, state = stack.forward_chunk(torch.randn(1, 7, 8), stack.init_state(1))
    for dtype in (torch.bfloat16, torch.float64):
        assert stored_bytes(stack, 7, dtype) == nbytes(stored(state, dtype))
    assert stored_bytes(stack, 7, None) == nbytes(state)


def test_keys_and_values_stay_as_they_are() -> None:
    stack = build_stack(ModelConfig("attention", vocab_size=1, d_model=8))
    state = stack.init_state(1, capacity=3)
    assert nbytes(stored(state, torch.bfloat16)) == nbytes(state)


def test_a_session_keeps_rounded_states_and_gives_back_its_own() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 attention s4d", vocab_size=9, d_model=8)).eval()
    begun = prefill(model, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    exact, session = Session(model, begun), Session(model, begun, state_dtype=torch.bfloat16)
    for _ in range(4):
        wanted, found = exact.step(), session.step()
        error = (found.logits - wanted.logits).abs().max() / wanted.logits.abs().max()
        assert error < 0.02
    kinds = [[leaf.dtype for leaf in pytree.tree_leaves(s)] for s in (session.state(), begun)]
    assert kinds[0] == kinds[1]
    assert nbytes(session._state.model.layers[0]) < nbytes(exact._state.model.layers[0])
    session.join(prefill(model, torch.tensor([[7, 8]])))
    session.select([2, 0])
    assert session.step().tokens.shape == (2,)
