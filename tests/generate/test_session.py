import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.generate import (
    Choice,
    Sampling,
    Session,
    SessionState,
    extend,
    generate,
    prefill,
    seeded,
    stream,
)
from stateline.layers import cat_states, nbytes, select_rows
from stateline.models.language_model import LanguageModel

Build = Callable[..., LanguageModel]

VOCAB = 11
PROMPT = torch.tensor([[1, 2, 3, 1, 2], [5, 5, 5, 5, 5], [9, 0, 10, 4, 7]])
RAGGED = [torch.tensor(row) for row in ([1, 2, 3], [5], [9, 0, 10, 4, 7, 7, 8], [4, 4, 1])]
FREE = Sampling(temperature=1.0)
NARROW = Sampling(1.5, top_k=5, top_p=0.9, repetition_penalty=1.3)

KINDS = ["attention(position=rope)", "h3(d_state=8) attention", "lstm s4d(d_state=8)"]
KINDS += ["h3(d_state=8)", "attention(position=hard_alibi)"]
KINDS += ["ladder(attention(position=alibi) h3(d_state=8))"]


@torch.no_grad()
def greedy_without_state(of: LanguageModel, tokens: Tensor, count: int) -> Tensor:
    """Run the whole sequence again for every token."""
    for _ in range(count):
        tokens = torch.cat([tokens, of(tokens)[:, -1].argmax(dim=-1)[:, None]], dim=1)
    return tokens[:, -count:]


@pytest.mark.parametrize("pattern", KINDS)
def test_greedy_tokens_are_the_likeliest_of_the_whole_forward_pass(
    build: Build, pattern: str
) -> None:
    made = build(pattern)
    found = generate(made, PROMPT, 12)
    assert found.equal(greedy_without_state(made, PROMPT, 12))
    assert len(found.unique()) > 3  # or it would not tell much


@pytest.mark.parametrize("length", [7, 8, 9, 17])
def test_prompts_longer_than_a_prefill_chunk_are_no_different(
    build: Build, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr("stateline.generate.session_state.PREFILL_CHUNK", 8)
    made = build("attention(position=rope) h3(d_state=8)", max_len=30)
    prompt = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    assert generate(made, prompt, 5).equal(greedy_without_state(made, prompt, 5))


def test_a_text_beyond_the_last_position_is_refused_without_a_look_at_the_state(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where calls of the model leave the check to the caller."""
    monkeypatch.setattr("stateline.models.inputs.values_at_hand", lambda _: False)
    made = build("h3(d_state=8)", max_len=8)
    after = extend(made, prefill(made, torch.ones(1, 4).long()), torch.ones(1, 5).long())
    assert after.length == 9  # the last token is not read
    for wrong in (
        lambda: prefill(made, torch.ones(1, 10).long()),
        lambda: extend(made, after, torch.ones(1, 1).long()),
        lambda: Session(made, prefill(made, [torch.ones(1).long(), torch.ones(9).long()])).step(),
    ):
        with pytest.raises(InputError, match="was made for max_len=8 tokens, got 9"):
            wrong()


@pytest.mark.parametrize("room", [1, 3])
def test_room_in_the_state_is_made_as_the_text_grows(build: Build, room: int) -> None:
    made = build("attention(position=rope) h3(d_state=8)")
    session = Session(made, prefill(made, RAGGED), room=room)
    found = torch.stack([session.step().tokens for _ in range(8)], dim=1)
    assert found.equal(generate(made, RAGGED, 8))


@pytest.mark.parametrize("sampling", [Sampling(), NARROW], ids=["greedy", "narrow"])
@pytest.mark.parametrize("pattern", KINDS)
def test_prompts_read_with_their_last_tokens_go_on_as_without(
    build: Build, pattern: str, sampling: Sampling
) -> None:
    made = build(pattern)
    whole = Session.after(made, RAGGED, seed=3, sampling=sampling, room=2)
    without = Session(made, prefill(made, RAGGED, seed=3), sampling=sampling)
    for _ in range(6):
        found, wanted = whole.step(), without.step()
        assert found.tokens.equal(wanted.tokens)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-10, atol=1e-10)
    for found, wanted in zip(
        *map(pytree.tree_leaves, (whole.state(), without.state())), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_the_first_token_after_prompts_takes_no_step(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.after(build("attention(position=rope)"), PROMPT)
    monkeypatch.setattr(session._decoder, "ready", None)
    assert session.step().tokens.shape == (3,)


def test_before_the_first_step_a_session_after_prompts_is_where_prefill_ends(build: Build) -> None:
    made = build("h3(d_state=8) attention")
    state, wanted = prefill(made, RAGGED), generate(made, RAGGED, 4)

    def tokens(session: Session) -> Tensor:
        return torch.stack([session.step().tokens for _ in range(4)], dim=1)

    assert tokens(Session(made, Session.after(made, RAGGED).state())).equal(wanted)
    assert tokens(copy.copy(Session.after(made, RAGGED))).equal(wanted)
    session = Session.after(made, RAGGED)
    session.select([2, 0])
    assert tokens(session).equal(wanted[[2, 0]])
    session = Session.after(made, RAGGED[:2])
    session.join(select_rows(state, [2, 3]))
    assert tokens(session).equal(wanted)
    session = Session.after(made, [RAGGED[1]] * 4)
    session.restore(state)
    assert tokens(session).equal(wanted)


def together_and_alone(
    model: LanguageModel, sampling: Sampling
) -> tuple[list[Choice], list[list[Choice]]]:
    """Choices for prompts of different lengths, in one batch and each by itself."""
    together = list(stream(model, RAGGED, 9, sampling=sampling, seed=4))
    alone = []
    for row, prompt in enumerate(RAGGED):
        state = seeded(prefill(model, prompt[None]), 4)
        state = state._replace(random=torch.tensor([[4, row, 0]]))
        session = Session(model, state, sampling=sampling)
        alone.append([session.step() for _ in range(9)])
    return together, alone


@pytest.mark.parametrize("sampling", [Sampling(), FREE, NARROW], ids=["greedy", "free", "narrow"])
@pytest.mark.parametrize("pattern", KINDS)
def test_a_row_of_a_ragged_batch_is_as_it_is_alone(
    build: Build, pattern: str, sampling: Sampling
) -> None:
    together, alone = together_and_alone(build(pattern), sampling)
    for step, choice in enumerate(together):
        for row, own in enumerate(alone):
            assert choice.tokens[row] == own[step].tokens[0]
            torch.testing.assert_close(
                choice.logits[row], own[step].logits[0], rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize("pattern", KINDS)
def test_a_row_of_a_ragged_batch_has_its_logits_in_single_precision_too(
    build: Build, pattern: str
) -> None:
    together, alone = together_and_alone(build(pattern).float(), Sampling())
    for row, own in enumerate(alone):
        torch.testing.assert_close(together[0].logits[row], own[0].logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [[3, 0], [True, False, False, True]], ids=["numbers", "mask"])
def test_rows_left_alone_go_on_as_before(build: Build, rows: list[int]) -> None:
    made = build("h3(d_state=8) attention")
    wanted = generate(made, RAGGED, 8, sampling=FREE)
    session = Session(made, prefill(made, RAGGED), sampling=FREE)
    found = [session.step().tokens[rows] for _ in range(3)]
    session.select(rows)
    found += [session.step().tokens for _ in range(5)]
    assert torch.stack(found, dim=1).equal(wanted[rows])


@pytest.mark.parametrize("sampling", [Sampling(), NARROW], ids=["greedy", "narrow"])
@pytest.mark.parametrize("pattern", KINDS)
def test_a_row_that_joins_gives_what_it_gives_alone(
    build: Build, pattern: str, sampling: Sampling
) -> None:
    made = build(pattern)
    wanted = generate(made, RAGGED, 9, sampling=sampling)
    later = prefill(made, RAGGED)
    session = Session(made, select_rows(later, [0, 1]), sampling=sampling, room=5)
    head = torch.stack([session.step().tokens for _ in range(3)], dim=1)
    session.join(select_rows(later, [2, 3]))
    session.select([3, 1, 2])  # the first row leaves
    tail = torch.stack([session.step().tokens for _ in range(6)], dim=1)
    assert head.equal(wanted[:2, :3])
    assert tail[1].equal(wanted[1, 3:])
    assert tail[[2, 0]].equal(wanted[2:, :6])


def test_rows_may_join_again_and_again(build: Build) -> None:
    made = build("attention(position=rope) h3(d_state=8)")
    wanted = generate(made, RAGGED, 8, sampling=FREE)
    states = prefill(made, RAGGED)
    session = Session(made, select_rows(states, [0]), sampling=FREE)
    found: list[list[int]] = [[] for _ in RAGGED]
    for joined in range(1, 5):
        for row, token in enumerate(session.step().tokens.tolist()):
            found[row].append(token)
        if joined < len(RAGGED):
            session.join(select_rows(states, [joined]))
    assert found == [wanted[row, : 4 - row].tolist() for row in range(4)]


@pytest.mark.parametrize("pattern", KINDS)
def test_rows_may_join_after_all_have_left(build: Build, pattern: str) -> None:
    made = build(pattern)
    states = prefill(made, RAGGED)
    session = Session(made, select_rows(states, [0, 1]))
    session.step()
    session.select([])
    with pytest.raises(InputError, match="no rows left: join a state"):
        session.step()
    session.join(select_rows(states, [2]))
    found = torch.cat([session.step().tokens for _ in range(3)])
    assert found.equal(generate(made, RAGGED, 3)[2])


def test_the_states_of_rows_that_have_left_are_not_read(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one's own need not trim or join states of no rows."""
    made = build("attention")
    session = Session(made, prefill(made, PROMPT))
    session.select([])
    monkeypatch.setattr("stateline.generate.session.trim", None)
    session.join(prefill(made, PROMPT))
    fresh = Session(made, prefill(made, PROMPT))
    assert session.step().tokens.equal(fresh.step().tokens)


@pytest.mark.parametrize(
    "other", ["h3(d_state=4)", "lstm", "h3(d_state=8) attention"], ids=["size", "kind", "more"]
)
def test_a_row_of_another_model_cannot_join(build: Build, other: str) -> None:
    made = build("h3(d_state=8)")
    session = Session(made, prefill(made, PROMPT))
    with pytest.raises(InputError, match="rows of a session must have a state of the same model"):
        session.join(prefill(build(other), PROMPT))
    with pytest.raises(InputError, match="in the same dtype, got another"):
        session.join(prefill(made.float(), PROMPT))


@pytest.mark.cpu
def test_nan_is_refused_at_once_on_the_cpu(build: Build) -> None:
    made = build("h3(d_state=8)")
    session = Session(made, prefill(made, PROMPT))
    session.step()
    made.norm.register_forward_hook(lambda *given: given[2] * float("nan"))
    with pytest.raises(InputError, match="the model gives NaN after 6 tokens"):
        session.step()


def test_rows_with_nan_can_leave_while_the_others_go_on(build: Build) -> None:
    made = build("h3(d_state=8)")
    alone = generate(made, PROMPT, 4)[2].tolist()
    session = Session(made, prefill(made, PROMPT))
    found = [session.step(check=False).tokens[2]]
    for row in (0, 1):
        hook = made.norm.register_forward_hook(
            lambda *given, at=row: given[2].index_fill(0, torch.tensor([at]), float("nan"))
        )
        found.append(session.step(check=False).tokens[2])
        hook.remove()
    assert session.nan_rows() == [0, 1]
    with pytest.raises(InputError, match="the model gives NaN after 6 tokens"):
        session.select([0, 2])
    with pytest.raises(InputError, match="the model gives NaN after 7 tokens"):
        session.select([1, 2])
    assert session.state([2]).length == 8
    session.select([2])
    assert session.nan_rows() == []
    found.append(session.step().tokens[0])
    assert torch.stack(found).tolist() == alone


def test_all_rows_may_leave_after_nan(build: Build) -> None:
    made = build("h3(d_state=8)")
    session = Session(made, prefill(made, PROMPT))
    hook = made.norm.register_forward_hook(lambda *given: given[2] * float("nan"))
    session.step(check=False)
    hook.remove()
    session.select([])
    session.join(prefill(made, PROMPT))
    assert session.step().tokens.equal(generate(made, PROMPT, 1)[:, 0])


@pytest.mark.parametrize("call", ["select", "join", "state"])
def test_a_call_between_steps_reports_nan(build: Build, call: str) -> None:
    made = build("h3(d_state=8)")
    start = prefill(made, PROMPT)
    session = Session(made, start)
    made.norm.register_forward_hook(lambda *given: given[2] * float("nan"))
    session.step(check=False)
    with pytest.raises(InputError, match="the model gives NaN after 5 tokens"):
        getattr(session, call)({"select": [0], "join": start, "state": [0]}[call])


def test_an_earlier_state_is_free_of_later_nan(build: Build) -> None:
    made = build("h3(d_state=8)")
    start = prefill(made, PROMPT)
    session = Session(made, start)
    hook = made.norm.register_forward_hook(lambda *given: given[2] * float("nan"))
    session.step(check=False)
    hook.remove()
    session.restore(start)
    assert session.step().tokens.tolist() == generate(made, PROMPT, 1)[:, 0].tolist()


def test_a_stream_yields_what_generate_returns(build: Build) -> None:
    made = build("h3(d_state=8) attention")
    choices = stream(made, PROMPT, 6, sampling=FREE, seed=3)
    tokens = torch.stack([choice.tokens for choice in choices], dim=1)
    assert tokens.equal(generate(made, PROMPT, 6, sampling=FREE, seed=3))


@pytest.mark.cpu  # elsewhere, a step is tried before it is recorded as a graph
def test_a_stream_computes_no_more_than_is_taken(build: Build) -> None:
    made = build("h3(d_state=8)", max_len=8)
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    made.norm.register_forward_hook(count)
    tokens = stream(made, PROMPT, 4)
    next(tokens), next(tokens)
    assert steps == 2  # the prompt, and one step


@pytest.mark.parametrize("sampling", [Sampling(), NARROW], ids=["greedy", "narrow"])
def test_log_probabilities_are_those_of_the_model_whatever_the_sampling(
    build: Build, sampling: Sampling
) -> None:
    made = build("h3(d_state=8) attention")
    choices = list(stream(made, PROMPT, 6, sampling=sampling))
    tokens = torch.stack([choice.tokens for choice in choices], dim=1)
    with torch.no_grad():
        logits = made(torch.cat([PROMPT, tokens], dim=1))[:, PROMPT.shape[1] - 1 : -1]
    wanted = logits.log_softmax(dim=-1).gather(2, tokens[..., None])[..., 0]
    found = torch.stack([choice.log_probs for choice in choices], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_no_new_tokens_is_an_empty_answer(build: Build) -> None:
    assert generate(build("h3(d_state=8)"), PROMPT, 0).shape == (3, 0)


def test_one_seed_gives_one_text_and_another_another(build: Build) -> None:
    made = build("h3(d_state=8)")
    first, again, other = (generate(made, PROMPT, 9, sampling=FREE, seed=s) for s in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_every_step_draws_its_own_numbers(build: Build) -> None:
    made = build("h3(d_state=8)")
    torch.nn.init.zeros_(made.head.weight)  # all tokens equally likely
    counts = generate(made, PROMPT, 60, sampling=FREE).flatten().bincount(minlength=VOCAB)
    assert 5 < int(counts.min()) <= int(counts.max()) < 35


def test_equal_prompts_in_a_batch_get_different_texts(build: Build) -> None:
    first, second = generate(build("h3(d_state=8)"), PROMPT[[0, 0]], 9, sampling=FREE)
    assert not first.equal(second)


def test_sampling_leaves_the_global_random_numbers_alone(build: Build) -> None:
    made = build("h3(d_state=8)")
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    generate(made, PROMPT, 2, sampling=FREE)
    assert torch.rand(1).equal(wanted)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1e-3), Sampling(1e-40)],
)
def test_narrow_sampling_is_greedy(build: Build, sampling: Sampling) -> None:
    made = build("h3(d_state=8)")
    assert generate(made, PROMPT, 9, sampling=sampling).equal(generate(made, PROMPT, 9))


def test_the_penalty_is_for_the_tokens_of_prompt_and_output(build: Build) -> None:
    """So strong a penalty that any new token with a positive logit comes before all others."""
    made = build("h3(d_state=8)")
    session = Session(made, prefill(made, PROMPT), sampling=Sampling(repetition_penalty=1e9))
    texts, tried = PROMPT, 0
    for _ in range(5):
        tokens, logits = session.step()
        for row, token in enumerate(tokens.tolist()):
            new = [t for t in range(VOCAB) if t not in texts[row] and logits[row, t] > 0]
            assert not new or token == max(new, key=logits[row].__getitem__)
            tried += bool(new) and token != int(logits[row].argmax())
        texts = torch.cat([texts, tokens[:, None]], dim=1)
    assert tried > 3


@pytest.mark.parametrize("sampling", [Sampling(), NARROW], ids=["greedy", "narrow"])
@pytest.mark.parametrize("pattern", KINDS)
def test_a_state_kept_midway_goes_on_as_if_nothing_had_been(
    build: Build, pattern: str, sampling: Sampling
) -> None:
    made = build(pattern)
    session = Session(made, prefill(made, RAGGED), sampling=sampling)
    head = [session.step().tokens for _ in range(4)]
    kept = session.state()
    for _ in range(3):
        session.step()
    again = Session(made, kept, sampling=sampling)
    tail = [again.step().tokens for _ in range(5)]
    wanted = generate(made, RAGGED, 9, sampling=sampling)
    assert torch.stack([*head, *tail], dim=1).equal(wanted)


def test_a_session_leaves_the_state_it_starts_from_alone(build: Build) -> None:
    made = build("attention h3(d_state=8) lstm")
    state = prefill(made, RAGGED)
    before = pytree.tree_map(torch.clone, state)
    session = Session(made, state, sampling=FREE)
    for _ in range(3):
        session.step()
    assert all(map(torch.equal, pytree.tree_leaves(state), pytree.tree_leaves(before)))


def pickled(session: Session) -> Session:
    loaded: Session = pickle.loads(pickle.dumps(session))
    return loaded


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_a_copy_of_a_session_goes_on_by_itself(
    build: Build, copied: Callable[[Session], Session]
) -> None:
    made = build("attention(position=rope) h3(d_state=8)")
    session = Session.after(made, PROMPT, sampling=FREE)
    wanted = list(stream(made, PROMPT, 6, sampling=FREE))
    for _ in range(3):
        session.step()
    other = copied(session)
    with torch.no_grad():
        [parameter.zero_() for parameter in other.model.parameters()]
    assert other.step().logits.eq(0).all()
    for choice in wanted[3:]:
        assert session.step().logits.equal(choice.logits)


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("rows", [[1, 0], []])
def test_a_shallow_copy_of_a_session_shares_the_model_alone(
    build: Build, rows: list[int], state_dtype: torch.dtype | None
) -> None:
    made = build("attention(position=rope) h3(d_state=8)").float()
    session, other = (
        Session(made, prefill(made, PROMPT[:2]), sampling=FREE, state_dtype=state_dtype)
        for _ in range(2)
    )
    for one in (session, other):
        [one.step() for _ in range(3)]
        one.select(rows)
        one.join(prefill(made, PROMPT[2:3], seed=5))
    copied = copy.copy(session)
    assert copied.model is made
    found = [copied.step() for _ in range(4)]
    for wanted, again in zip([other.step() for _ in range(4)], found, strict=True):
        for choice in (session.step(), again):
            assert choice.logits.equal(wanted.logits)
            assert choice.tokens.equal(wanted.tokens)
    for one in (session, copied):
        one.join(prefill(made, PROMPT[:1], seed=6))  # by the sampling of the session
    assert all(session.step().tokens.equal(copied.step().tokens) for _ in range(4))


def test_a_kept_state_has_no_free_room(build: Build) -> None:
    made = build("attention(position=rope)").float()
    session = Session(made, prefill(made, PROMPT[:1]))
    for _ in range(3):
        session.step()
    assert nbytes(session.state().model) == made.state_bytes(7)  # 5 + 3 tokens, the last not fed


@pytest.mark.parametrize("pattern", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_reading_in_pieces_is_reading_at_once(build: Build, pattern: str, cut: int) -> None:
    made = build(pattern)
    pieces = extend(made, prefill(made, PROMPT[:, :cut]), PROMPT[:, cut:])
    whole = prefill(made, PROMPT)
    for found, wanted in zip(pytree.tree_leaves(pieces), pytree.tree_leaves(whole), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_what_is_read_after_a_text_counts_as_its_continuation(build: Build) -> None:
    made = build("attention(position=rope) h3(d_state=8)")
    session = Session(made, prefill(made, PROMPT))
    said = torch.stack([session.step().tokens for _ in range(3)], dim=1)
    more = torch.tensor([[1, 1], [2, 2], [3, 3]])
    state = extend(made, session.state(), more)
    whole = prefill(made, torch.cat([PROMPT, said, more], dim=1))
    torch.testing.assert_close(state.model.position, whole.model.position)
    torch.testing.assert_close(
        Session(made, state).step().logits, Session(made, whole).step().logits
    )


def test_forks_of_a_state_go_different_ways(build: Build) -> None:
    made = build("attention h3(d_state=8)")
    state = prefill(made, PROMPT[:1])
    forks = cat_states([extend(made, state, torch.tensor([[token]])) for token in (3, 8)])
    session = Session(made, forks)
    found = torch.stack([session.step().tokens for _ in range(4)], dim=1)
    for row, token in enumerate((3, 8)):
        prompt = torch.cat([PROMPT[:1], torch.tensor([[token]])], dim=1)
        assert found[row].equal(generate(made, prompt, 4)[0])


def test_the_state_of_a_batch_is_a_tree_of_rows(build: Build) -> None:
    state: SessionState = prefill(build("h3(d_state=8)"), RAGGED)
    assert select_rows(state, [1]).token.tolist() == [5]
    assert state.token.tolist() == [3, 5, 8, 1]
    assert (state.model.position + 1).tolist() == [3, 1, 7, 3]
    assert state.length == 7


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda m: generate(m, PROMPT[:, :0], 3), "the prompt is empty: give at least one token"),
        (lambda m: generate(m, PROMPT[:0], 3), "the prompt is empty: give at least one token"),
        (lambda m: generate(m, [], 3), "the prompt is empty: give at least one token"),
        (lambda m: generate(m, [PROMPT[0], PROMPT[0, :0]], 3), "the prompt is empty: give at"),
        (
            lambda m: generate(m, PROMPT[0], 3),
            r"\(batch, length\), .* got a tensor of shape \(5,\)",
        ),
        (lambda m: prefill(m, PROMPT[0]), r"\(batch, length\), .* got a tensor of shape \(5,\)"),
        (lambda m: prefill(m, PROMPT[None]), r"got a tensor of shape \(1, 3, 5\): give such as"),
        (lambda m: prefill(m, [PROMPT]), r"got a tensor of shape \(3, 5\) in a list: give such as"),
        (lambda m: prefill(m, [[1, 2]]), r"got a list in a list: give such as torch.tensor\(\[\["),
        (lambda m: generate(m, [[1, 2]], 3), r"got a list in a list: give such as torch.tensor"),
        (lambda m: extend(m, prefill(m, PROMPT[:1]), PROMPT[:2]), r"the 1 rows .* got \(2, 5\)"),
        (lambda m: extend(m, prefill(m, PROMPT), PROMPT[0]), r"the 3 rows .* got \(5,\): fork a"),
        (lambda m: generate(m, PROMPT + 1, 3), "must be from 0 to 10, got 1 to 11"),
        (lambda m: generate(m, PROMPT - 1, 3), "must be from 0 to 10, got -1 to 9"),
        (lambda m: generate(m, PROMPT, -1), "max_new_tokens must not be negative, got -1"),
        (lambda m: generate(m, PROMPT, 3, seed=-1), r"seed must be from 0 to 2\*\*63 - 1, got -1"),
        (lambda m: generate(m, PROMPT, 9), "prompt and new tokens make 13 positions, but the mod"),
        (
            lambda m: generate(m, [PROMPT[0], PROMPT[0].repeat(2)], 4),
            "new tokens make 13 positions",
        ),
        (lambda m: extend(m, prefill(m, PROMPT), PROMPT + 1), "must be from 0 to 10, got 1 to 11"),
        (
            lambda _: Sampling(-0.1),
            "wants temperature to be a finite number of at least 0, got -0.1",
        ),
        (
            lambda _: Sampling(float("nan")),
            "wants temperature to be a finite number of at least 0, got nan",
        ),
        (lambda _: Sampling(1.0, top_k=0), "wants top_k to be int of at least 1 or none, got 0"),
        (
            lambda _: Sampling(1.0, top_p=0.0),
            "wants top_p to be a finite number above 0, at most 1 or none, got 0.0",
        ),
        (
            lambda _: Sampling(1.0, top_p=1.1),
            "wants top_p to be a finite number above 0, at most 1 or none, got 1.1",
        ),
    ],
)
def test_what_cannot_be_generated_is_refused(
    build: Build, run: Callable[[LanguageModel], Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(build("h3(d_state=8)", max_len=12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, m: Session(m, s, sampling=[FREE, FREE]), "one per row, 3, got a list of 2: giv"),
        (lambda s, m: Session(m, s, sampling=[FREE]), "one per row, 3, got a list of 1: give as"),
        (lambda s, m: Session(m, s, room=0), "room must be at least 1, got room=0"),
        (lambda s, m: Session(m, s, room=-1), "room must be at least 1, got room=-1"),
    ],
)
def test_a_session_that_cannot_begin_is_refused(
    build: Build, change: Callable[[SessionState, LanguageModel], Session], message: str
) -> None:
    made = build("h3(d_state=8)")
    with pytest.raises(InputError, match=message):
        change(prefill(made, PROMPT), made)


def test_a_session_names_the_kind_of_state_that_it_does_not_take(build: Build) -> None:
    made = build("h3")
    with pytest.raises(InputError, match="got a LanguageModelState: give what prefill returns"):
        Session(made, made.init_state(1))


@pytest.mark.parametrize(
    "other", ["h3(d_state=4)", "lstm", "h3(d_state=8) attention"], ids=["size", "kind", "more"]
)
def test_a_session_refuses_the_state_of_another_model(build: Build, other: str) -> None:
    made = build("h3(d_state=8)")
    session, foreign = Session(made, prefill(made, PROMPT)), prefill(build(other), PROMPT)
    with pytest.raises(InputError, match="rows of a session must have a state of the same model"):
        Session(made, foreign)
    with pytest.raises(InputError, match="rows of a session must have a state of the same model"):
        session.join(foreign)
    with pytest.raises(InputError, match="rows of a session must have a state of the same model"):
        session.restore(foreign)
    assert session.step().logits.equal(Session(made, prefill(made, PROMPT)).step().logits)
    with pytest.raises(InputError, match="in the same dtype, got another"):
        Session(build("h3(d_state=8)").float(), prefill(made, PROMPT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, new: s.join(new, [FREE]), "one per row, 2, got a list of 1"),
        (lambda s, new: s.join(new, []), "one per row, 2, got a list of 0"),
        (lambda s, new: s.restore(new), "the 3 rows of the session, got 2: select rows"),
        (lambda s, _: s.select([3]), r"numbers below 3, the rows of the state, got \[3\]: give"),
        (lambda s, _: s.select([0, -4]), r"numbers below 3, the rows of the state, got \[0, -4\]"),
        (lambda s, _: s.state([3]), r"numbers below 3, the rows of the state, got \[3\]: give"),
    ],
)
def test_a_refused_change_leaves_the_session_as_it_was(
    build: Build, change: Callable[[Session, SessionState], None], message: str
) -> None:
    made = build("h3(d_state=8) attention")
    wanted = generate(made, PROMPT, 5, sampling=FREE)
    session = Session(made, prefill(made, PROMPT), sampling=FREE)
    found = [session.step().tokens]
    with pytest.raises(InputError, match=message):
        change(session, prefill(made, PROMPT[:2]))
    found += [session.step().tokens for _ in range(4)]
    assert torch.stack(found, dim=1).equal(wanted)


def test_the_model_can_be_trained_on_from_the_state_of_a_session(build: Build) -> None:
    made = build("h3(d_state=8) attention")
    session = Session(made, prefill(made, PROMPT))
    session.step()
    state = session.state()
    logits, _ = made.step(state.token, state.model)
    logits.sum().backward()
    assert made.embedding.weight.grad is not None


def test_rows_of_different_sampling_decode_together_as_alone(build: Build) -> None:
    """A server has rows of many settings; each draws from its own."""
    model, samplings = build("h3(d_state=8) attention"), [FREE, Sampling(), NARROW, FREE]
    states = [seeded(prefill(model, row[None]), seed) for seed, row in enumerate(RAGGED)]

    def decoded(session: Session) -> Tensor:
        return torch.stack([session.step().tokens for _ in range(9)], dim=1)

    sessions = [Session(model, s, sampling=c) for s, c in zip(states, samplings, strict=True)]
    alone = [decoded(one) for one in sessions]
    session = Session(model, cat_states(states[:2]), sampling=samplings[:2])
    session.join(cat_states(states[2:]), samplings[2:])
    session.select([3, 2, 1, 0])
    assert decoded(session).equal(torch.cat(alone[::-1]))
    drawn = [one.state().random for one in sessions[::-1]]
    assert session.state().random.equal(torch.cat(drawn))
