"""Theorem 2.7: with |S| states, copying fails in at least 1 - |S| / D^L of the strings of L."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.models.constructions import Automaton, queue_automaton

D, L = 3, 4
BOS, SEP = D, D + 1


LETTERS = torch.tensor(list(itertools.product(range(D), repeat=L)))
"""All strings."""


def answered(automaton: Automaton) -> tuple[Tensor, Tensor, set[int]]:
    """What it writes after each string, its states after SEP, and all states that it visits."""
    ends = [torch.full((len(LETTERS), 1), token) for token in (BOS, SEP)]
    prompt = torch.cat([ends[0], LETTERS, ends[1]], dim=1)
    state = automaton.init_state(len(LETTERS))
    visited: set[int] = set(state.number.tolist())
    for token in prompt.T:
        logits, state = automaton.step(token, state)
        visited |= set(state.number.tolist())
    after, said = state.number, []
    for _ in range(L):
        said.append(logits.argmax(dim=1))
        logits, state = automaton.step(said[-1], state)
        visited |= set(state.number.tolist())
    return torch.stack(said, dim=1), after, visited


def copy_error(automaton: Automaton) -> tuple[Fraction, set[int], set[int]]:
    """Share of all strings that it does not copy, the states it visits, and those after SEP."""
    said, after, visited = answered(automaton)
    right = (said == LETTERS).all(dim=1)
    return Fraction(int((~right).sum()), len(right)), visited, set(after.tolist())


@pytest.mark.parametrize("kept", range(L + 1))
def test_the_error_of_the_queue_is_its_closed_form(kept: int) -> None:
    error, visited, after = copy_error(queue_automaton(kept, n_letters=D))
    assert error == 1 - Fraction(D**kept, D**L)
    assert error >= 1 - Fraction(len(visited), D**L)
    # The proof needs only the states after SEP, and counted so the bound is met.
    assert error == 1 - Fraction(len(after), D**L)


@pytest.mark.parametrize("n_states", [2, 5, 20])
def test_no_random_automaton_beats_the_bound(n_states: int) -> None:
    generator = torch.Generator().manual_seed(n_states)

    def drawn(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    for _ in range(100):
        automaton = Automaton(drawn(n_states, n_states, D + 4), drawn(D, n_states))
        error, visited, after = copy_error(automaton)
        assert error >= 1 - Fraction(len(after), D**L) >= 1 - Fraction(len(visited), D**L)


def test_what_is_written_follows_from_the_state_after_the_prompt() -> None:
    """Lemma D.1: prompts that lead to one state have one answer."""
    generator = torch.Generator().manual_seed(0)
    update = torch.randint(5, (5, D + 4), generator=generator)
    automaton = Automaton(update, torch.randint(D, (5,), generator=generator))
    said, after, _ = answered(automaton)
    answers = {(state, *row) for state, row in zip(after.tolist(), said.tolist(), strict=True)}
    assert 1 < len(answers) == len(set(after.tolist())) < len(LETTERS)


def test_it_streams() -> None:
    automaton = queue_automaton(2, n_letters=D)
    x = automaton.example_input(5, 9)
    head, state = automaton.forward_chunk(x[:, :4], automaton.init_state(5))
    logits = [head]
    for token in x[:, 4:].unbind(dim=1):
        last, state = automaton.step(token, state)
        logits.append(last[:, None])
    assert torch.cat(logits, dim=1).equal(automaton(x))


def test_too_many_states_are_refused() -> None:
    with pytest.raises(InputError, match="got kept=26 and n_letters=26"):
        queue_automaton(26)
