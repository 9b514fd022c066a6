"""Rows of different lengths are read together as each would be read alone."""

import pytest
import torch

from stateline.generate import read_ragged
from stateline.layers import select_rows
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

LENGTHS = [5, 0, 9, 1, 5]


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    pattern = "attention(position=rope) h3 mamba gated_delta_net"
    return LanguageModel(ModelConfig(pattern, vocab_size=11, d_model=16)).eval()


@torch.no_grad()
def test_ragged_rows_give_the_logits_and_states_of_each_row_alone(model: LanguageModel) -> None:
    before = model.forward_chunk(model.example_input(5, 3), model.init_state(5))[1]
    rows = [model.example_input(1, n)[0] if n else torch.tensor([], dtype=int) for n in LENGTHS]
    logits, after = read_ragged(model, rows, before)
    probe = model.example_input(1, 4)
    for row, tokens in enumerate(rows):
        alone, state = model.forward_chunk(tokens[None], select_rows(before, [row]))
        torch.testing.assert_close(logits[row], alone[0], rtol=1e-5, atol=1e-5)
        wanted, _ = model.forward_chunk(probe, state)
        found, _ = model.forward_chunk(probe, select_rows(after, [row]))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("keep", [0, 1, 3, 100])
def test_only_the_last_logits_of_each_row_are_kept(model: LanguageModel, keep: int) -> None:
    rows = [model.example_input(1, max(1, n))[0] for n in LENGTHS]
    all_logits, _ = read_ragged(model, rows, model.init_state(5))
    kept, _ = read_ragged(model, rows, model.init_state(5), keep=keep)
    for found, wanted in zip(kept, all_logits, strict=True):
        assert len(found) == min(keep, len(wanted))
        torch.testing.assert_close(found, wanted[len(wanted) - len(found) :])
