"""Speculative decoding: the model's own tokens and distribution, whatever the draft proposes."""

from collections.abc import Callable

import pytest
import torch

from stateline.errors import InputError
from stateline.generate import Sampling, Session, Speculation, generate, prefill, probabilities
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
PATTERNS = ["h3(d_state=8)", "attention(position=rope)", "lstm s4d(d_state=8)", "h3 attention"]
PATTERNS += ["mamba(d_state=4)", "gated_delta_net", "sliding_attention rg_lru", "linear_attention"]
PATTERNS += ["ladder(attention(position=alibi) h3(d_state=8))", "mamba2(d_state=8) feed_forward"]


def speculation(
    model: LanguageModel, draft: LanguageModel, prompt: torch.Tensor, **settings: object
) -> Speculation:
    states = [prefill(one, prompt[None], seed=3) for one in (model, draft)]
    return Speculation(model, states[0], draft, states[1], **settings)


def tokens(decoding: Speculation | Session, count: int) -> list[int]:
    return [int(decoding.step().tokens) for _ in range(count)]


def prompts(count: int) -> torch.Tensor:
    return torch.randint(11, (count, 7), generator=torch.Generator().manual_seed(0))


def disturbed(model: LanguageModel, build: Build, pattern: str, by: float) -> LanguageModel:
    """A draft that is often right: the model with noise on its weights."""
    draft = build(pattern)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(by * weight.abs().mean() * noise)
    return draft


def compare_greedy(build: Build, pattern: str, count: int, length: int) -> Speculation:
    model = build(pattern)
    draft = disturbed(model, build, pattern, 0.2)
    wanted = generate(model, prompts(count), length).tolist()
    total = [0, 0]
    for prompt, row in zip(prompts(count), wanted, strict=True):
        decoding = speculation(model, draft, prompt, ahead=3)
        assert tokens(decoding, length) == row
        total[0] += decoding.proposed
        total[1] += decoding.accepted
    assert 0 < total[1] < total[0]  # some were taken back
    return decoding


@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_tokens_are_those_of_plain_decoding(build: Build, pattern: str) -> None:
    compare_greedy(build, pattern, 4, 16)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_tokens_of_many_prompts(build: Build, pattern: str) -> None:
    compare_greedy(build, pattern, 16, 20)


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_any_draft_serves_any_model(build: Build, ahead: int) -> None:
    for pattern, other in (("h3(d_state=8)", "attention lstm"), ("attention", "h3(d_state=4)")):
        model, draft = build(pattern), build(other)
        decoding = speculation(model, draft, prompts(1)[0], ahead=ahead)
        assert tokens(decoding, 15) == generate(model, prompts(1), 15)[0].tolist()
        assert decoding.accepted <= decoding.proposed == ahead * decoding.rounds


def test_the_model_itself_is_always_right(build: Build) -> None:
    model = build("h3(d_state=8) attention")
    decoding = speculation(model, model, prompts(1)[0], ahead=4)
    tokens(decoding, 15)
    assert (decoding.rounds, decoding.accepted) == (3, 12)


@pytest.mark.parametrize("pattern", PATTERNS[:4])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_the_state_is_after_the_tokens_that_were_given(
    build: Build, pattern: str, count: int
) -> None:
    model = build(pattern)
    decoding = speculation(model, disturbed(model, build, pattern, 0.2), prompts(1)[0], ahead=3)
    first = tokens(decoding, count)
    rest = tokens(Session(model, decoding.state()), 8)
    assert first + rest == generate(model, prompts(1), count + 8)[0].tolist()
    assert first + tokens(decoding, 8) == first + rest  # state() has changed nothing


SAMPLINGS = [Sampling(2.0), Sampling(4.0, top_k=3, top_p=0.95, repetition_penalty=1.5)]


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("count", [100, pytest.param(1500, marks=pytest.mark.slow)])
def test_sampled_tokens_have_the_distribution_of_the_model(
    build: Build, sampling: Sampling, count: int
) -> None:
    """Chi-square of the first three tokens, against their chances under the model."""
    model, draft = build("h3(d_state=4)", vocab_size=4), build("lstm", vocab_size=4)
    prompt = torch.tensor([1, 2])
    found = torch.zeros(4, 4, 4)
    states = [prefill(one, prompt[None]) for one in (model, draft)]
    for seed in range(count):
        state = states[0]._replace(random=torch.tensor([[seed, 0, 0]]))
        decoding = Speculation(model, state, draft, states[1], sampling=sampling, ahead=2)
        a, b, c = tokens(decoding, 3)
        found[a, b, c] += 1
    wanted = torch.zeros(4, 4, 4, dtype=torch.float64)
    for a in range(4):
        for b in range(4):
            text = torch.tensor([[1, 2, a, b]])
            chance = 1.0
            with torch.no_grad():
                logits = model(text)[0]
            for place, token in ((1, a), (2, b)):
                seen = torch.zeros(1, 4, dtype=torch.bool)
                seen[0, text[0, : place + 1]] = True
                chance *= float(probabilities(logits[place, None], sampling, seen)[0, token])
            seen[0, text[0]] = True
            wanted[a, b] = chance * probabilities(logits[3, None], sampling, seen)[0]
    expected = wanted.flatten() * count
    likely = expected >= 5
    assert found.flatten()[expected == 0].sum() == 0
    difference = (found.flatten().double() - expected)[likely]
    statistic = float((difference**2 / expected[likely]).sum())
    freedom = int(likely.sum())
    assert freedom >= 4
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_a_text_of_learned_positions_goes_to_its_last_one(build: Build) -> None:
    model, draft = build("attention", max_len=16), build("lstm", max_len=16)
    decoding = speculation(model, draft, prompts(1)[0], ahead=4)
    assert tokens(decoding, 10) == generate(model, prompts(1), 10)[0].tolist()


def test_a_draft_of_another_vocabulary_or_text_is_refused(build: Build) -> None:
    model = build("lstm")
    with pytest.raises(InputError, match="vocabulary of the model, 11 tokens, got 12"):
        speculation(model, build("lstm", vocab_size=12), prompts(1)[0])
    states = [prefill(model, torch.tensor([row])) for row in ([1], [1, 2])]
    with pytest.raises(InputError, match="got 1 texts, 1 and 2 tokens"):
        Speculation(model, states[0], model, states[1])


def test_a_model_that_gives_nan_is_noticed() -> None:
    model = LanguageModel(ModelConfig("lstm", 11, 8)).eval()
    broken = LanguageModel(ModelConfig("lstm", 11, 8)).eval()
    decoding = speculation(broken, model, prompts(1)[0])
    with torch.no_grad():
        broken.embedding.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="the model gives NaN after"):
        decoding.step()
