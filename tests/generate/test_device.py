"""Generation on a simulated accelerator: it computes there alone, and does not wait."""

import pytest
import torch

from stateline.errors import InputError
from stateline.generate import Sampling, Session, generate, prefill, stream
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from tests.devices import watch

pytestmark = pytest.mark.cpu  # each test chooses its devices

PROMPTS = [torch.tensor([1, 2, 3]), torch.tensor([4])]
PATTERNS = ["h3 attention(position=rope)", "lstm s4d", "mamba"]
NARROW = Sampling(1.2, top_k=9, top_p=0.9, repetition_penalty=1.3)


def model(pattern: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, vocab_size=16, d_model=8)).eval()


@pytest.mark.parametrize("sampling", [Sampling(), NARROW], ids=["greedy", "narrow"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_model_generates_on_its_device_alone(pattern: str, sampling: Sampling) -> None:
    made = model(pattern)
    wanted = generate(made, PROMPTS, 12, sampling=sampling)
    made.to("fake")
    with watch() as counts:
        found = generate(made, PROMPTS, 12, sampling=sampling)
    assert found.device.type == "fake"
    assert found.cpu().equal(wanted)
    assert counts.heavy_on_cpu == set()


def test_generation_of_a_fixed_length_does_not_wait_at_every_token() -> None:
    made = model("h3 attention").to("fake")
    reads = []
    for count in (6, 30):
        with watch() as counts:
            generate(made, PROMPTS, count, sampling=NARROW)
        reads.append(counts.reads)
    assert reads[1] - reads[0] <= 1


def poisoned(after: int) -> LanguageModel:
    """A model whose logits are NaN from a number of tokens on."""
    made, steps = model("h3").to("fake"), 0

    def spoil(_: object, __: object, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal steps
        steps += 1
        return output * float("nan") if steps > after else None

    made.norm.register_forward_hook(spoil)
    return made


def test_nan_is_found_late_but_named_where_it_was() -> None:
    session = Session(poisoned(after=6), prefill(model("h3").to("fake"), PROMPTS[0][None]))
    for _ in range(9):
        session.step()
    with pytest.raises(InputError, match="the model gives NaN after 9 tokens"):
        session.state()


def test_rows_join_and_leave_between_steps() -> None:
    """On an accelerator, each of these calls checks the steps so far."""
    made = model("h3 attention").to("fake")
    session = Session(made, prefill(made, PROMPTS))
    session.step()
    session.join(prefill(made, PROMPTS[1][None]))
    found = [session.step().tokens[2] for _ in range(2)]
    session.select([2, 0])
    found.append(session.step().tokens[0])
    assert session.nan_rows() == []
    assert torch.stack(found).cpu().equal(generate(made, PROMPTS[1:], 3)[0].cpu())


@pytest.mark.parametrize("sampling", [Sampling(), NARROW], ids=["greedy", "narrow"])
def test_nan_ends_generation(sampling: Sampling) -> None:
    for count in (9, 70):
        with pytest.raises(InputError, match="the model gives NaN after"):
            list(stream(poisoned(after=4), PROMPTS[0][None], count, sampling=sampling))
