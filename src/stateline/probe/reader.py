"""The interface to a model that a probe asks, and its implementation for Stateline's models."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from stateline.data import Tokenizer
from stateline.generate import answer
from stateline.models.inputs import warn_beyond_training
from stateline.models.language_model import LanguageModel
from stateline.probe.network import Network, StatelineNetwork

Tokens = Sequence[int]
"""The tokens of a text."""


class Reader(ABC):
    """A language model with its tokenizer.

    Attributes:
        name: The name that the user gave.
        max_len: Largest number of tokens that it can read and write; ``None`` if there is no limit.
        end: Tokens that end a text.
    """

    name: str
    max_len: int | None
    end: frozenset[int]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""

    @abstractmethod
    def decode(self, tokens: Tokens) -> str:
        """The text of tokens."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special tokens that the model expects."""
        return self.encode(text)

    @abstractmethod
    def answer(
        self, prompts: Sequence[Tokens], new_tokens: Sequence[int], stop: str, *, never_empty: bool
    ) -> list[str]:
        """Continue prompts greedily; the other prompts do not change an answer.

        Args:
            prompts: Tokens of each prompt.
            new_tokens: Largest number of new tokens for each prompt.
            stop: A text ends before this string.
            never_empty: Whether the first token must not be an end token.

        Returns:
            The new text for each prompt, without end tokens.
        """

    @abstractmethod
    def network(self) -> Network:
        """The layers of the model, which can be changed one by one."""


class StatelineReader(Reader):
    """A model of Stateline.

    Args:
        name: The name that the user gave.
        model: In evaluation mode.
        tokenizer: Its tokenizer, whose end tokens end a text.
    """

    def __init__(self, name: str, model: LanguageModel, tokenizer: Tokenizer) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.max_len, self.end = model.max_len, tokenizer.end_tokens

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.encode(text).tolist()

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, after those that begin a text."""
        return self.tokenizer.prompt(text).tolist()

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens)

    def answer(
        self, prompts: Sequence[Tokens], new_tokens: Sequence[int], stop: str, *, never_empty: bool
    ) -> list[str]:
        """Continue prompts; rows that are finished leave the batch."""
        longest = max(len(prompt) + new for prompt, new in zip(prompts, new_tokens, strict=True))
        warn_beyond_training(self.model.config, longest)
        return answer(
            self.model,
            self.tokenizer,
            prompts,
            new_tokens,
            stop=[stop],
            end=self.end,
            least=int(never_empty),
        )

    def network(self) -> Network:
        """The blocks of the model."""
        return StatelineNetwork(self.model)
