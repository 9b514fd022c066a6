"""Tasks: what a model is trained on and scored at.

``TASKS`` is the table of contents; a new task is one file and one line in it.
"""

from stateline.errors import InputError, unknown_name
from stateline.models.pattern import construct, parse_pattern
from stateline.tasks.algorithm import Algorithm
from stateline.tasks.associative_recall import AssociativeRecall
from stateline.tasks.base import (
    IGNORE,
    Batch,
    ConsecutiveBatch,
    ConsecutiveTask,
    CorpusTask,
    ExampleTask,
    GeneratedTask,
    LabelledTask,
    Problems,
    Task,
    generator,
)
from stateline.tasks.byte_text import ByteText
from stateline.tasks.classification import ClassificationTask, Rows
from stateline.tasks.copying import Copying
from stateline.tasks.duplicate_ngram import DuplicateNgram
from stateline.tasks.eeg import EEG
from stateline.tasks.flip_flop import FlipFlop
from stateline.tasks.induction_head import InductionHead
from stateline.tasks.listops import ListOps
from stateline.tasks.multi_query_recall import MultiQueryRecall
from stateline.tasks.ngram_lookup import NgramLookup
from stateline.tasks.object_collision import ObjectCollision
from stateline.tasks.random_walk import RandomWalk
from stateline.tasks.sequential_image import SequentialImage
from stateline.tasks.speech_commands import SpeechCommands
from stateline.tasks.spoken_digits import SpokenDigits
from stateline.tasks.stream import Episode, StreamTask
from stateline.tasks.text import Text
from stateline.tasks.tokens import Tokens
from stateline.tasks.word_problem import WordProblem

__all__ = [
    "EEG",
    "IGNORE",
    "TASKS",
    "Algorithm",
    "AssociativeRecall",
    "Batch",
    "ByteText",
    "ClassificationTask",
    "ConsecutiveBatch",
    "ConsecutiveTask",
    "Copying",
    "CorpusTask",
    "DuplicateNgram",
    "Episode",
    "ExampleTask",
    "FlipFlop",
    "GeneratedTask",
    "InductionHead",
    "LabelledTask",
    "ListOps",
    "MultiQueryRecall",
    "NgramLookup",
    "ObjectCollision",
    "Problems",
    "RandomWalk",
    "Rows",
    "SequentialImage",
    "SpeechCommands",
    "SpokenDigits",
    "StreamTask",
    "Task",
    "Text",
    "Tokens",
    "WordProblem",
    "generator",
    "make_task",
]

TASKS: dict[str, type[Task]] = {
    "algorithm": Algorithm,
    "associative_recall": AssociativeRecall,
    "byte_text": ByteText,
    "copying": Copying,
    "duplicate_ngram": DuplicateNgram,
    "eeg": EEG,
    "flip_flop": FlipFlop,
    "induction_head": InductionHead,
    "listops": ListOps,
    "multi_query_recall": MultiQueryRecall,
    "ngram_lookup": NgramLookup,
    "object_collision": ObjectCollision,
    "random_walk": RandomWalk,
    "sequential_image": SequentialImage,
    "speech_commands": SpeechCommands,
    "spoken_digits": SpokenDigits,
    "text": Text,
    "tokens": Tokens,
    "word_problem": WordProblem,
}


def make_task(text: str, *, seed: int = 0) -> Task:
    """Build a task from its name and keywords.

    Args:
        text: For example ``"copying"`` or ``"copying(max_len=20)"``, in the grammar of patterns.
        seed: Fixes every batch; not negative.

    Returns:
        The task.

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
    item, *others = parse_pattern(text)
    if others or item.core or item.repeat > 1:
        raise InputError(
            f"a task is one name with keywords, such as 'copying(max_len=20)', got {text!r}"
        )
    if item.name not in TASKS:
        raise unknown_name("task", item.name, TASKS)
    if seed < 0:
        raise InputError(f"seed must be 0 or more, got seed={seed}")
    return construct("task", item.name, TASKS[item.name], item.keywords, seed)
