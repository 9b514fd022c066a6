"""Models that continue prompts: what a probe needs of them, and models of Stateline."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from stateline.data import Tokenizer
from stateline.generate import answer
from stateline.models.language_model import LanguageModel


class Reader(ABC):
    """A language model with its tokenizer.

    Attributes:
        name: As the user named it.
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
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special tokens that the model expects."""
        return self.encode(text)

    @abstractmethod
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[int],
        stop: str,
        *,
        never_empty: bool,
    ) -> list[str]:
        """Continue prompts greedily, each as it would be alone.

        Args:
            prompts: Tokens of each prompt.
            new_tokens: Largest number of new tokens of each.
            stop: A text ends before this string.
            never_empty: Whether an end token may not be the first.

        Returns:
            The new text of each, without end tokens.
        """


class StatelineReader(Reader):
    """A model of Stateline, decoded on its state.

    Args:
        name: As the user named it.
        model: In evaluation mode.
        tokenizer: Its tokenizer, whose end-of-text token ends a text.
    """

    def __init__(self, name: str, model: LanguageModel, tokenizer: Tokenizer) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.max_len, end = model.max_len, tokenizer.end_of_text
        self.end = frozenset() if end is None else frozenset([end])

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.encode(text).tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[int],
        stop: str,
        *,
        never_empty: bool,
    ) -> list[str]:
        """Continue prompts; rows that are finished leave the batch."""
        return answer(
            self.model,
            self.tokenizer,
            prompts,
            new_tokens,
            stop=[stop],
            end=self.end,
            never_empty=never_empty,
        )
