"""Tasks: what a model is trained on and scored at.

``TASKS`` lists them: a new task of the package is one file and one line in it. A task outside the
package gets its name by ``register_task``.
"""

from functools import partial
from types import EllipsisType
from typing import Any

from stateline.errors import InputError, unknown_name
from stateline.pattern import parse_pattern
from stateline.plugins import Registry
from stateline.settings import check_kind
from stateline.tasks.base import (
    IGNORE,
    Batch,
    ConsecutiveBatch,
    CorpusTask,
    ExampleTask,
    GeneratedTask,
    LabelledTask,
    PackedBatch,
    Problems,
    Task,
    generator,
)
from stateline.tasks.rows import Rows, RowsTask
from stateline.tasks.signals.eeg import EEG
from stateline.tasks.signals.pathfinder import Pathfinder
from stateline.tasks.signals.sequential_image import SequentialImage
from stateline.tasks.signals.signals import Signals
from stateline.tasks.signals.speech_commands import SpeechCommands
from stateline.tasks.signals.spoken_digits import SpokenDigits
from stateline.tasks.synthetic.algorithm import Algorithm
from stateline.tasks.synthetic.associative_recall import AssociativeRecall
from stateline.tasks.synthetic.copying import Copying
from stateline.tasks.synthetic.duplicate_ngram import DuplicateNgram
from stateline.tasks.synthetic.flip_flop import FlipFlop
from stateline.tasks.synthetic.in_context_recall import InContextRecall
from stateline.tasks.synthetic.induction_head import InductionHead
from stateline.tasks.synthetic.memorization import Memorization
from stateline.tasks.synthetic.multi_query_recall import MultiQueryRecall
from stateline.tasks.synthetic.ngram_lookup import NgramLookup
from stateline.tasks.synthetic.object_collision import ObjectCollision
from stateline.tasks.synthetic.random_walk import RandomWalk
from stateline.tasks.synthetic.selective_copying import SelectiveCopying
from stateline.tasks.synthetic.stream import Episode, StreamTask
from stateline.tasks.synthetic.strings import StringTask
from stateline.tasks.synthetic.word_problem import WordProblem
from stateline.tasks.text.answers import Answers
from stateline.tasks.text.byte_text import ByteText
from stateline.tasks.text.corpus import LongTextTask
from stateline.tasks.text.listops import ListOps
from stateline.tasks.text.mixture import Mixture
from stateline.tasks.text.retrieval import Retrieval
from stateline.tasks.text.text import Text
from stateline.tasks.text.tokens import Tokens

__all__ = [
    "EEG",
    "IGNORE",
    "TASKS",
    "Algorithm",
    "Answers",
    "AssociativeRecall",
    "Batch",
    "ByteText",
    "ConsecutiveBatch",
    "Copying",
    "CorpusTask",
    "DuplicateNgram",
    "Episode",
    "ExampleTask",
    "FlipFlop",
    "GeneratedTask",
    "InContextRecall",
    "InductionHead",
    "LabelledTask",
    "ListOps",
    "LongTextTask",
    "Memorization",
    "Mixture",
    "MultiQueryRecall",
    "NgramLookup",
    "ObjectCollision",
    "PackedBatch",
    "Pathfinder",
    "Problems",
    "RandomWalk",
    "Retrieval",
    "Rows",
    "RowsTask",
    "SelectiveCopying",
    "SequentialImage",
    "Signals",
    "SpeechCommands",
    "SpokenDigits",
    "StreamTask",
    "StringTask",
    "Task",
    "Text",
    "Tokens",
    "WordProblem",
    "generator",
    "make_task",
    "register_task",
]

TASKS: Registry[type[Task]] = Registry(
    "task",
    "stateline.tasks",
    Task,
    "seed",
    {
        "algorithm": Algorithm,
        "answers": Answers,
        "associative_recall": AssociativeRecall,
        "byte_text": ByteText,
        "copying": Copying,
        "duplicate_ngram": DuplicateNgram,
        "eeg": EEG,
        "flip_flop": FlipFlop,
        "in_context_recall": InContextRecall,
        "induction_head": InductionHead,
        "listops": ListOps,
        "memorization": Memorization,
        "mixture": Mixture,
        "multi_query_recall": MultiQueryRecall,
        "ngram_lookup": NgramLookup,
        "object_collision": ObjectCollision,
        "pathfinder": Pathfinder,
        "random_walk": RandomWalk,
        "retrieval": Retrieval,
        "selective_copying": SelectiveCopying,
        "sequential_image": SequentialImage,
        "signals": Signals,
        "speech_commands": SpeechCommands,
        "spoken_digits": SpokenDigits,
        "text": Text,
        "tokens": Tokens,
        "word_problem": WordProblem,
    },
)


def register_task(name: str, cls: type[Any] | EllipsisType = ...) -> Any:
    """Give a task of your own a name, also as ``@register_task("mine")``.

    The constructor takes ``seed``. All other parameters are keyword-only, with annotations and
    defaults; the text of a task may set them.

    Args:
        name: The name: letters, digits and underscores.
        cls: A subclass of :class:`Task`; without it, a decorator is returned.

    Returns:
        The class.

    Raises:
        InputError: If the name is malformed or taken by another class, or if the class cannot be
            constructed from keywords.
    """
    if isinstance(cls, EllipsisType):
        return partial(register_task, name)
    TASKS.register(name, cls)
    return cls


MAX_SETTING = 10**9
MAX_POSITIONS = 1 << 28
"""Upper limits, so that a typo gives an error message."""


def make_task(text: str, *, seed: int = 0) -> Task:
    """Build a task from its name and keywords.

    Args:
        text: For example ``"copying"`` or ``"copying(max_len=15)"``, in the grammar of patterns.
        seed: Fixes every batch; not negative.

    Raises:
        InputError: If the text is malformed or is not exactly one task, if the task or a keyword
            is unknown, or if a value cannot be used.

    Example:
        >>> make_task("copying(max_len=16)").eval_lengths
        (16, 24, 32, 48, 64)
        >>> make_task("copyng")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        stateline.errors.InputError: unknown task 'copyng': did you mean 'copying'? \
Known: algorithm, ...
    """
    check_kind("text", text, str, "'copying'")
    item, *others = parse_pattern(text)
    if others or item.core or item.repeat > 1:
        raise InputError(
            f"a task is one name with keywords, such as 'copying(max_len=15)', got {text!r}"
        )
    if item.name not in TASKS:
        raise unknown_name("task", item.name, TASKS, extensible=True)
    for key, value in item.keywords.items():
        if isinstance(value, int) and value > MAX_SETTING:
            raise InputError(f"{key} of {item.name} must be at most {MAX_SETTING:,}, got {value}")
    kind: Any = TASKS[item.name]
    task: Task = kind(seed, **item.keywords)
    _check_sizes(task)
    return task


def _check_sizes(task: Task) -> None:
    """Refuse wrong lengths, and batches that would fill the memory or take forever to draw."""
    lengths = task.eval_lengths
    if task.train_length not in lengths or not all(type(n) is int and n > 0 for n in lengths):
        raise InputError(
            f"eval_lengths of {type(task).__name__} must be whole numbers with "
            f"train_length={task.train_length} among them, got {lengths}"
        )
    drawn = (task.problems_per_batch, max(task.eval_lengths))
    for rows, longest in ((task.batch_size, task.train_length), drawn):
        length = max(longest, task.least_row)
        if length * rows > MAX_POSITIONS:
            raise InputError(
                f"a batch may have up to {MAX_POSITIONS:,} positions, got {rows:,} rows of length "
                f"{length:,}: lower the lengths or batch_size"
            )
