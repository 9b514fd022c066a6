"""Models that continue prompts: what a probe needs of them, and models of Stateline."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch

from stateline.data import Tokenizer, load_tokenizer
from stateline.data.tokenizer import FILE
from stateline.errors import InputError
from stateline.files import read_json_object, user_path
from stateline.generate import Session, load_run, prefill
from stateline.generate.runs import find_model
from stateline.models.convert.table import load_pretrained
from stateline.models.language_model import LanguageModel

HUGGING_FACE = "hf:"
"""Before a folder: read it with the package transformers."""

END = "<|endoftext|>"
_TAIL = 8
"""Last tokens in which a stop string is looked for."""


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
            stop: A text may end once it contains this string.
            never_empty: Whether an end token may not be the first.

        Returns:
            The new text of each, without end tokens.
        """

    def finished(self, tokens: Sequence[int], limit: int, stop: str) -> bool:
        """Whether no further token can change an answer."""
        return (
            len(tokens) >= limit
            or tokens[-1] in self.end
            or stop in self.decode(list(tokens[-_TAIL:]))
        )

    def text(self, tokens: Sequence[int], limit: int) -> str:
        """The text of new tokens up to the limit or to an end token."""
        kept = list(tokens[:limit])
        ends = (place for place, token in enumerate(kept) if token in self.end)
        return self.decode(kept[: next(ends, len(kept))])


class StatelineReader(Reader):
    """A model of Stateline, decoded on its state.

    Args:
        name: As the user named it.
        model: In evaluation mode.
        tokenizer: Its tokenizer.
        end: Tokens that end a text.
    """

    def __init__(
        self, name: str, model: LanguageModel, tokenizer: Tokenizer, end: frozenset[int]
    ) -> None:
        self.name, self.model, self.tokenizer, self.end = name, model, tokenizer, end
        self.max_len = model.max_len

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.encode(text).tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; numbers of a padded vocabulary have none."""
        return self.tokenizer.decode([t for t in tokens if t < self.tokenizer.vocab_size])

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[int],
        stop: str,
        *,
        never_empty: bool,
    ) -> list[str]:
        """Continue prompts; rows that are finished leave the batch."""
        state = prefill(self.model, [torch.tensor(prompt) for prompt in prompts])
        session = Session(self.model, state)
        answers: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        for number in range(max(new_tokens)):
            choice = session.step()
            tokens = choice.tokens
            if number == 0 and never_empty:
                tokens = self._without_end(choice.logits)
                session = Session(self.model, session.state()._replace(token=tokens))
            for row, token in zip(rows, tokens.tolist(), strict=True):
                answers[row].append(token)
            going = [
                place
                for place, row in enumerate(rows)
                if not self.finished(answers[row], new_tokens[row], stop)
            ]
            if not going:
                break
            if len(going) < len(rows):
                session.select(going)
                rows = [rows[place] for place in going]
        return [self.text(*pair) for pair in zip(answers, new_tokens, strict=True)]

    def _without_end(self, logits: torch.Tensor) -> torch.Tensor:
        """The best token of each row that is no end token."""
        ends = torch.tensor(sorted(self.end), dtype=torch.int64, device=logits.device)
        return logits.index_fill(1, ends, -torch.inf).argmax(dim=1)


def load_reader(
    spec: str,
    *,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Reader:
    """Read a model.

    Args:
        spec: A folder of a run or a model of Stateline, a folder with published weights, or
            ``hf:`` and a folder for the package transformers.
        tokenizer: A tokenizer instead of the model's own, as for
            :func:`stateline.data.load_tokenizer`.
        device: Where the weights shall be.
        dtype: Their precision; by default that in which they were saved.

    Raises:
        InputError: If the model or its tokenizer cannot be read.
    """
    if spec.startswith(HUGGING_FACE):
        from stateline.probe.hugging_face import HuggingFaceReader

        return HuggingFaceReader(spec, tokenizer=tokenizer, device=device, dtype=dtype)
    home = find_model(user_path(spec, "model"))
    settings = read_json_object(home / "config.json", "model configuration")
    if "pattern" in settings:
        model, own = load_run(home, device=device, dtype=dtype)
        named = load_tokenizer(tokenizer) if tokenizer else own
    else:
        model = load_pretrained(home, device=device, dtype=dtype)
        named = load_tokenizer(tokenizer or _own_tokenizer(home))
    if named.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {named.vocab_size} tokens and the model in {spec} "
            f"{model.config.vocab_size}: give the model's own with --tokenizer"
        )
    return StatelineReader(spec, model, named, _ends(settings, named))


def fingerprint(spec: str, tokenizer: str | None) -> str:
    """A hash of the names, sizes and times of the files of a model and its tokenizer."""
    home = find_model(user_path(spec.removeprefix(HUGGING_FACE), "model"))
    files = sorted(home.glob("*.*")) if home.is_dir() else []
    digest = sha256()
    for path in [*files, *([Path(tokenizer)] if tokenizer and tokenizer != "byte" else [])]:
        if path.is_file():
            about = path.stat()
            digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _own_tokenizer(home: Path) -> Path:
    if not (home / FILE).is_file():
        raise InputError(f"there is no {FILE} in {home}: name a tokenizer with --tokenizer")
    return home / FILE


def _ends(settings: dict[str, object], tokenizer: Tokenizer) -> frozenset[int]:
    """The end tokens that a configuration names, or else the tokenizer's own."""
    named = settings.get("eos_token_id")
    if isinstance(named, int | list):
        return frozenset(named if isinstance(named, list) else [named])
    try:
        tokens = tokenizer.encode(END).tolist()
    except InputError:  # a tokenizer of characters may not know it
        return frozenset()
    return frozenset(tokens) if len(tokens) == 1 else frozenset()
