"""Answers: predict the answers to prompts, from examples of both."""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.data.examples import AnswerText, Example, ExampleReader
from stateline.data.splits import held_out_by_hash
from stateline.errors import InputError
from stateline.files import sha256, user_path
from stateline.settings import Between, Count, Size, at_least
from stateline.tasks.base import Batch, PackedBatch, train_settings
from stateline.tasks.text.corpus import TextTask

TooLong = Literal["refuse", "drop", "cut"]


class Answers(TextTask):
    """Predict the answers of a file of prompts and answers (supervised fine-tuning).

    A line of the file is an example in JSON: ``{"prompt": "2 + 2 = ", "answer": "4"}``. The model
    reads prompt and answer as one text, each example from an empty state and from position zero;
    only the tokens of the answer are targets, among them its end: the tokenizer's token for the end
    of a text, or a newline. Prompt and answer are joined as they are, so a space between them is
    part of one of the two. A line with a field ``messages`` and no prompt is a chat, whose last
    message is the answer; the chat template of the tokenizer writes it.

    The split is by the hash of the prompt, so that equal prompts are on one side. Scores are the
    loss per token of the held-out answers in nats, its exponential, and the share of the first
    ``answered`` of them that greedy decoding gives exactly, with their ends.

    Args:
        seed: Fixes every batch; the split does not depend on it.
        path: The file, JSON lines.
        tokenizer: ``byte``, or the file or folder of a tokenizer.
        prompt: Name of the field with the prompt.
        answer: Name of the field with the answer.
        length: Positions in a row; a whole example must fit.
        batch_size: Rows in a training batch.
        documents: ``"pack"`` packs several examples into each row, by best fit, or one after the
            other if the state is carried. ``"separate"`` gives each example its own row.
        held_out: Share of the examples to hold out.
        too_long: What is done with an example that does not fit into a row: ``"refuse"`` ends with
            an error, ``"drop"`` leaves it out, ``"cut"`` keeps its beginning if that holds a part
            of the answer.
        answered: Number of held-out prompts that are answered by greedy decoding; 0 for none.

    Raises:
        InputError: If the file cannot be read or has no such examples, if an answer is empty, or if
            there are too few examples or different prompts.
    """

    title = "Answers"
    about = (
        "Loss per token of the held-out answers, given their prompts. It compares only between "
        "models with one tokenizer; exact_match is the share of answers that are given exactly."
    )
    metric = "answer_loss"
    unit = 1.0
    training = train_settings(TextTask, lr=1e-3)

    def __init__(  # noqa: PLR0913
        self,
        seed: Size = 0,
        *,
        path: str = "",
        tokenizer: str = "byte",
        prompt: str = "prompt",
        answer: str = "answer",
        length: Count = 512,
        batch_size: Count = 16,
        documents: Literal["pack", "separate"] = "pack",
        held_out: Between = 0.1,
        too_long: TooLong = "refuse",
        answered: Size = 64,
    ) -> None:
        if not path:
            raise InputError(
                "the task answers needs a file of examples, JSON lines with a prompt and an answer "
                "each: answers(path=FILE)"
            )
        self.seed, self.batch_size, self.documents = seed, batch_size, documents
        self.train_length, self.eval_lengths = length, (length,)
        reader = ExampleReader(tokenizer, prompt=prompt, answer=answer)
        self.tokenizer, self.vocab_size = reader.tokenizer, reader.tokenizer.vocab_size
        self.path, self.answered = path, answered
        read = reader.read(path)
        examples = _fitting(read, length, too_long)
        if len(examples) < 3:
            raise InputError(f"{path} must have at least 3 examples, got {len(examples)}: add some")
        self._left_out = len(read) - len(examples)
        self._hold_out(examples, held_out)

    def _hold_out(self, examples: list[Example], share: float, salt: str = "") -> None:
        """Split by the hash of salt and prompt."""
        prompts = [salt + example.prompt for example in examples]
        chosen = held_out_by_hash(prompts, share, f"prompts of {self.path}")
        held_out = [examples[number] for number in chosen]
        others = sorted(set(range(len(examples))) - set(chosen))
        training = [examples[number] for number in others]
        self._training, self._held_out = self._texts = AnswerText(training), AnswerText(held_out)
        if self.documents == "separate" and len(training) < self.batch_size:
            raise InputError(
                f"{self.path} must have at least batch_size={self.batch_size} examples to train "
                f"on, got {len(training)}: add some, or lower batch_size"
            )

    def train_batch(self, index: int) -> Batch | PackedBatch:
        """Training batch number ``index``: whole examples, shuffled in every epoch."""
        return self._shuffled(index)

    def held_out(self, length: int) -> Iterator[Batch | PackedBatch]:
        """The held-out examples once, in rows of ``length``, at least the training length."""
        at_least(self.train_length, length=length)
        return super().held_out(length)

    def questions(self) -> list[Example]:
        """The held-out examples whose prompts are answered."""
        return self._texts[1].examples[: self.answered]

    def beginning(self, length: int) -> Int[Tensor, "1 length"]:
        """The end of the first held-out prompt."""
        first = self._texts[1].examples[0]
        return torch.from_numpy(first.tokens[: first.answer][-length:]).long()[None]

    def score_names(self) -> set[str]:
        """The metric, the perplexity per token, and the share of exact answers."""
        return super().score_names() | ({"exact_match"} if self.answered else set())

    def hold_out_validation(self) -> str:
        """Hold out about a tenth of the training prompts, and score only these."""
        examples = self._texts[0].examples
        self._hold_out(examples, share=0.1, salt="validation ")
        count = len(self._texts[1].examples)
        return f"{count:,} of {len(examples):,} training examples, held out from training"

    def baselines(self) -> Mapping[str, float]:
        """None: the size of a text after gzip is not a loss of answers."""
        return {}

    def describe(self) -> Mapping[str, object]:
        """Sizes and hash of the file."""
        training, held_out = self._texts
        return {
            "source": self.path,
            "training_examples": len(training.examples),
            "held_out_examples": len(held_out.examples),
            "left_out_examples": self._left_out,
            "training_tokens": len(training),
            "answer_tokens": sum(len(own.tokens) - own.answer for own in training.examples),
            "vocab_size": self.vocab_size,
            "sha256": sha256(user_path(self.path, "examples")),
        }


def _fitting(examples: list[Example], length: int, too_long: TooLong) -> list[Example]:
    """The examples that fit into rows of a length, and what is kept of the other examples."""
    sizes = [len(example.tokens) - 1 for example in examples]  # the last token is only a target
    if too_long == "refuse" and max(sizes, default=0) > length:
        raise InputError(
            f"{sum(size > length for size in sizes)} of {len(sizes)} examples do not fit into rows "
            f"of length={length}, the longest needs {max(sizes)}: raise length, or leave them out "
            "with too_long=drop, or keep their beginnings with too_long=cut"
        )
    kept = [own._replace(tokens=own.tokens[: length + 1]) for own in examples]
    if too_long == "drop":
        kept = [own for own, size in zip(kept, sizes, strict=True) if size <= length]
    return [own for own in kept if own.answer < len(own.tokens)]
