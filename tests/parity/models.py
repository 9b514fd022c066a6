"""What tests of whole official models compare."""

import torch
from torch import Tensor

from stateline.generate import generate
from stateline.models.language_model import LanguageModel


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """The same but for rounding in float32."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * max(1, float(wanted.abs().max())))


def hidden_states(model: LanguageModel, tokens: Tensor, n_layers: int) -> list[Tensor]:
    """As transformers counts: the embeddings, then after each layer, at the end normalised."""
    h = model.embedding(tokens)
    hidden, links = [h], model.stack.links
    per_layer = len(links) // n_layers
    for number, link in enumerate(links, 1):
        h = link(h)
        if number % per_layer == 0:
            hidden.append(h)
    return [*hidden[:-1], model.norm(h)]


def assert_hidden_near(model: LanguageModel, wanted: dict[str, Tensor]) -> None:
    n_layers = sum(name.startswith("hidden_") for name in wanted) - 1
    for number, h in enumerate(hidden_states(model, wanted["tokens"], n_layers)):
        assert_near(h, wanted[f"hidden_{number}"])


def assert_decodes(model: LanguageModel, tokens: Tensor, greedy: Tensor) -> None:
    """``greedy`` is the prompt, and what follows it."""
    length = tokens.shape[1]
    assert torch.equal(greedy[:, :length], tokens)
    assert torch.equal(generate(model, tokens, greedy.shape[1] - length), greedy[:, length:])
