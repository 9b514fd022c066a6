from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline import generate as module
from stateline.errors import InputError
from stateline.generate import GREEDY, Sampling, choose, generate, stream
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

VOCAB = 11
PROMPT = torch.tensor([[1, 2, 3, 1, 2], [5, 5, 5, 5, 5], [9, 0, 10, 4, 7]])
FREE = Sampling(temperature=1.0)


def model(pattern: str, **settings: Any) -> LanguageModel:
    """A model with strong opinions, in double precision, so that the likeliest token is clear."""
    torch.manual_seed(0)
    config = ModelConfig(pattern, VOCAB, 8, tie_embeddings=False, **settings)
    made = LanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)
    return made


@torch.no_grad()
def greedy_without_state(of: LanguageModel, tokens: Tensor, count: int) -> Tensor:
    """Run the whole sequence again for every token."""
    for _ in range(count):
        tokens = torch.cat([tokens, of(tokens)[:, -1].argmax(dim=-1)[:, None]], dim=1)
    return tokens[:, -count:]


HYBRIDS = ["attention(position=rope)", "h3(d_state=8) attention", "lstm s4d(d_state=8)"]
HYBRIDS += ["ladder(attention(position=alibi) h3(d_state=8))"]


@pytest.mark.parametrize("pattern", HYBRIDS)
def test_greedy_tokens_are_the_likeliest_of_the_whole_forward_pass(pattern: str) -> None:
    made = model(pattern)
    found = generate(made, PROMPT, 12)
    assert found.equal(greedy_without_state(made, PROMPT, 12))
    assert len(found.unique()) > 3  # or it would not tell much


@pytest.mark.parametrize("length", [7, 8, 9, 17])
def test_prompts_longer_than_a_prefill_chunk_are_no_different(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(module, "PREFILL_CHUNK", 8)
    made = model("attention(position=rope) h3(d_state=8)", max_len=30)
    prompt = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    assert generate(made, prompt, 5).equal(greedy_without_state(made, prompt, 5))


def test_rows_do_not_depend_on_each_other() -> None:
    made = model("h3(d_state=8) attention")
    alone = [generate(made, row[None], 8) for row in PROMPT]
    assert generate(made, PROMPT, 8).equal(torch.cat(alone))


def test_a_stream_yields_what_generate_returns() -> None:
    made = model("h3(d_state=8) attention")
    tokens = list(stream(made, PROMPT, 6, sampling=FREE, seed=3))
    assert torch.stack(tokens, dim=1).equal(generate(made, PROMPT, 6, sampling=FREE, seed=3))


def test_a_stream_computes_no_more_than_is_taken() -> None:
    made = model("h3(d_state=8)", max_len=8)
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    made.norm.register_forward_hook(count)
    tokens = stream(made, PROMPT, 4)
    next(tokens), next(tokens)
    assert steps == 2  # the prompt, and one step


def test_no_new_tokens_is_an_empty_answer() -> None:
    assert generate(model("h3(d_state=8)"), PROMPT, 0).shape == (3, 0)


def test_one_seed_gives_one_text_and_another_another() -> None:
    made = model("h3(d_state=8)")
    first, again, other = (generate(made, PROMPT, 9, sampling=FREE, seed=s) for s in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_sampling_leaves_the_global_random_numbers_alone() -> None:
    made = model("h3(d_state=8)")
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    generate(made, PROMPT, 2, sampling=FREE)
    assert torch.rand(1).equal(wanted)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1e-3), Sampling(1e-40)],
)
def test_narrow_sampling_is_greedy(sampling: Sampling) -> None:
    made = model("h3(d_state=8)")
    assert generate(made, PROMPT, 9, sampling=sampling).equal(generate(made, PROMPT, 9))


# In descending order of probability: tokens 2, 0, 3, 1.
PROBABILITIES = torch.tensor([0.3, 0.05, 0.5, 0.15])


def shares(sampling: Sampling) -> list[float]:
    """How often each token is drawn."""
    draws = 20_000
    logits = PROBABILITIES.log().expand(draws, -1)
    tokens = choose(logits, sampling, torch.Generator().manual_seed(0))
    return (tokens.bincount(minlength=4) / draws).tolist()


def test_free_sampling_follows_the_probabilities() -> None:
    assert shares(FREE) == pytest.approx(PROBABILITIES.tolist(), abs=0.02)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_the_root_of_the_probabilities(temperature: float) -> None:
    powers = PROBABILITIES ** (1 / temperature)
    wanted = (powers / powers.sum()).tolist()
    assert shares(Sampling(temperature)) == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [
        (0.1, [2]),
        (0.49, [2]),
        (0.51, [2, 0]),
        (0.79, [2, 0]),
        (0.81, [2, 0, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, nucleus: list[int]) -> None:
    kept = torch.zeros(4)
    kept[nucleus] = PROBABILITIES[nucleus]
    assert shares(Sampling(1.0, top_p=top_p)) == pytest.approx(
        (kept / kept.sum()).tolist(), abs=0.02
    )
    assert {token for token, share in enumerate(shares(Sampling(1.0, top_p=top_p))) if share} == {
        *nucleus
    }


@pytest.mark.parametrize("top_k", [1, 2, 3, 9])
def test_top_k_keeps_so_many_tokens(top_k: int) -> None:
    drawn = [token for token, share in enumerate(shares(Sampling(1.0, top_k=top_k))) if share]
    assert drawn == sorted([2, 0, 3, 1][:top_k])


def test_top_p_counts_the_probabilities_after_top_k() -> None:
    """Of the two likeliest, 0.5 and 0.3, the first alone has 0.625."""
    assert shares(Sampling(1.0, top_k=2, top_p=0.6)) == [0, 0, 1, 0]
    assert shares(Sampling(1.0, top_p=0.6)) != [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda m: generate(m, PROMPT[:, :0], 3), "the prompt is empty: give at least one token"),
        (lambda m: generate(m, PROMPT[:0], 3), "the prompt is empty: give at least one token"),
        (lambda m: generate(m, PROMPT + 1, 3), "must be from 0 to 10, got 1 to 11"),
        (lambda m: generate(m, PROMPT - 1, 3), "must be from 0 to 10, got -1 to 9"),
        (lambda m: generate(m, PROMPT, -1), "max_new_tokens must not be negative, got -1"),
        (lambda _: Sampling(-0.1), "temperature must not be negative, got -0.1"),
        (lambda _: Sampling(float("nan")), "temperature must not be negative, got nan"),
        (lambda _: Sampling(1.0, top_k=0), "top_k must be at least 1, got 0"),
        (lambda _: Sampling(1.0, top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
        (lambda _: Sampling(1.0, top_p=1.1), "top_p must be above 0 and at most 1, got 1.1"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    run: Callable[[LanguageModel], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(model("h3(d_state=8)"))


def test_ties_are_broken_towards_the_first_token() -> None:
    assert choose(torch.zeros(2, 4), GREEDY, torch.Generator()).tolist() == [0, 0]
