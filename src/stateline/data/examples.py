"""Examples of prompts and answers, or chats, each in a line of JSON."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from stateline.data.chat import chat_text
from stateline.data.documents import field_of_row, row_of_line
from stateline.data.load import load_tokenizer
from stateline.data.token_text import TokenText
from stateline.errors import InputError
from stateline.files import regular_file, user_path

CHAT = "messages"
"""Field of a chat."""


class Example(NamedTuple):
    """A prompt and its answer.

    Attributes:
        prompt: Text of the prompt.
        tokens: Tokens of the prompt and then of the answer.
        answer: Number of tokens of the prompt.
    """

    prompt: str
    tokens: Int[np.ndarray, " length"]
    answer: int


class AnswerText(TokenText):
    """A text whose documents are examples and whose targets are the tokens of the answers.

    Args:
        examples: The examples.

    Example:
        >>> text = AnswerText([Example("hi", np.array([104, 105, 33, 10]), 2)])
        >>> text.asked(0, 4)
        array([False, False,  True,  True])
    """

    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples
        sizes = [len(example.tokens) for example in examples]
        super().__init__(sizes, lambda n: examples[n].tokens, np.cumsum([0, *sizes]))

    def asked(self, start: int, stop: int) -> Bool[np.ndarray, " length"]:
        """Whether each of these tokens of an example belongs to its answer."""
        number = int(np.searchsorted(self.borders, start, side="right")) - 1
        return np.arange(start, stop) >= self.borders[number] + self.examples[number].answer


class ExampleReader:
    """Reads examples.

    Prompt and answer are joined as they are, and each is encoded separately, as in generation. An
    answer ends with the tokenizer's token for the end of a text, or with a newline if there is
    none. A line that has a field ``messages`` and no prompt is a chat, whose last message is the
    answer; the tokenizer's chat template writes both texts.

    Args:
        tokenizer: As for :func:`~stateline.data.load_tokenizer`; for chats, a folder with a chat
            template.
        prompt: Name of the field with the prompt.
        answer: Name of the field with the answer.

    Raises:
        InputError: If the tokenizer cannot be read.

    Attributes:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: str, *, prompt: str, answer: str) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self._source, self._fields = tokenizer, {"prompt": prompt, "answer": answer}
        end = self.tokenizer.end_of_text
        self._end = self.tokenizer.encode("\n") if end is None else np.array([end])

    def read(self, path: str) -> list[Example]:
        """The examples of a file, in its order.

        Raises:
            InputError: If the file cannot be read, a line is not JSON or lacks a field, or a
                prompt or an answer is empty.
        """
        file = regular_file(user_path(path, "examples"), "examples")
        with file.open("rb") as lines:
            return [
                self._example(line, f"{path}, line {number},")
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]

    def _example(self, line: bytes, place: str) -> Example:
        row = row_of_line(line, place)
        chat = isinstance(row, dict) and CHAT in row and self._fields["prompt"] not in row
        texts = self._of_chat(row[CHAT], place) if chat else self._of_fields(row, place)
        prompt, answer = self.tokenizer.prompt(texts[0]), self.tokenizer.encode(texts[1])
        for what, text, tokens in zip(self._fields, texts, (prompt, answer), strict=True):
            if not text.strip() or not len(tokens):
                raise InputError(f"{place} has an empty {what}: fill it, or leave the line out")
        end = self._end[:0] if chat else self._end
        tokens = np.concatenate([prompt, answer, end]).astype(np.int32)
        return Example(texts[0], tokens, len(prompt))

    def _of_fields(self, row: Any, place: str) -> tuple[str, ...]:
        return tuple(
            field_of_row(row, key, place, f"{name}=FIELD").decode(errors="surrogatepass")
            for name, key in self._fields.items()
        )

    def _of_chat(self, messages: Any, place: str) -> tuple[str, ...]:
        try:
            if messages[-1]["role"] != "assistant":
                raise ValueError(f"its last message has the role {messages[-1]['role']!r}")
            prompt = chat_text(self.tokenizer, messages[:-1])
            whole = chat_text(self.tokenizer, messages, prompt=False)
            if not whole.startswith(prompt):
                raise ValueError("the template writes the prompt differently before an answer")
        except (InputError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise InputError(
                f"{place} must be a chat that the template of {self._source} can write and that "
                f"ends with an answer of the assistant: {error or type(error).__name__}"
            ) from error
        return prompt, whole[len(prompt) :]
